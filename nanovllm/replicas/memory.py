"""`ReplicaMemory`: the memory of all replicas, which updates fill and sleep gives back."""

from collections.abc import Callable, Iterable, Sequence

from nanovllm.adapters.adapter import Given
from nanovllm.replicas.supervisor import Replicas
from nanovllm.updates.ends import check_ends
from nanovllm.updates.ledger import Expected
from nanovllm.updates.parcel import Named, Parcel, parcels
from nanovllm.utils.modes import without_modes


class ReplicaMemory:
    """The `Memory` of replicas, each of which opens parcels itself.

    Args:
        replicas: processes, which have started.
        expected: tensors of the model.
    """

    def __init__(self, replicas: Replicas, expected: Expected) -> None:
        self._replicas, self._expected = replicas, expected

    def expected(self) -> Expected:
        """The tensors of the model."""
        return self._expected

    def fill(self, tensors: Iterable[Named], begin: Callable[[], None]) -> None:
        """Fill the weights from tensors, which have the model's names.

        Raises:
            ValueError: naming one whose values contradict the model.
            WorkerError: if no replica is left.
        """
        if isinstance(tensors, list):
            with without_modes():
                check_ends(self._expected, tensors)
        begin()
        for parcel, _ in parcels(tensors):
            self._replicas.keep_as_they_are()
            self._replicas.tell_all("fill_parcel", parcel)

    def check_parcel(self, parcel: Parcel) -> None:
        """Refuse a parcel, as each replica would, before any of them has written it."""
        self._replicas.tell_all("check_parcel", parcel)

    def fill_parcel(self, parcel: Parcel, begin: Callable[[], None]) -> None:
        """Fill them from a parcel. Raises as `fill`, and RuntimeError if it cannot be opened."""
        self.check_parcel(parcel)
        begin()
        self._replicas.keep_as_they_are()
        self._replicas.tell_all("fill_parcel", parcel)

    def end_update(self) -> None:
        """Fill what comes last, and wait for the devices."""
        self._replicas.tell_all("end_update")

    def give_up_update(self) -> None:
        """Forget what an update that has failed has left half done."""
        self._replicas.tell_all("give_up_update")

    def reload(self, adapters: Sequence[Given]) -> None:
        """Fill the weights from the checkpoint again, with these adapters."""
        self._replicas.keep_as_they_are()
        self._replicas.tell_all("reload_ranks", adapters)

    def sleep(self, level: int) -> None:
        """Give the memory back."""
        self._replicas.tell_all("sleep_ranks", level)

    def wake(self, tags: list[str]) -> None:
        """Take it again."""
        self._replicas.tell_all("wake_ranks", tags)
