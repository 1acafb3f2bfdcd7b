"""`Ledger`: the tensors that an update of weights must bring, and has brought. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanovllm.checkpoint.names import (
    EMBEDDING,
    HEAD,
    Wanted,
    has_tower,
    is_left_out,
    spellings,
)
from nanovllm.utils.checks import listed

SOURCE = "the model"
OF_PEFT = "base_model.model.", ".base_layer.", ".lora_"  # in names of a PeftModel's tensors


@dataclass(frozen=True)
class Expected:
    """The tensors of a model.

    Attributes:
        wanted: facts of each tensor, by its name in a model of text alone.
        is_part: whether a checkpoint of the model may have other parts, such as one for images.
    """

    wanted: dict[str, Wanted]
    is_part: bool

    @property
    def is_tied(self) -> bool:
        """Whether the LM head has the values of the embedding."""
        return HEAD not in self.wanted

    @cached_property
    def own_names(self) -> dict[str, str]:
        """The model's name of each tensor, by all names that a checkpoint may have for it."""
        own = {spelling: name for name in self.wanted for spelling in spellings(name, self.is_part)}
        return own | dict.fromkeys(spellings(HEAD, self.is_part), HEAD) if self.is_tied else own

    def leaves_out(self, name: str) -> bool:
        """Whether the model has no place for a tensor of this name, and needs none."""
        return is_left_out(name, self.is_part, self._has_tower)

    @cached_property
    def _has_tower(self) -> bool:
        return has_tower(self.wanted)


class Described(NamedTuple):
    """A tensor's name, shape and dtype, as safetensors names it."""

    name: str
    shape: list[int]
    dtype: str


class Ledger:
    """The books of one update.

    Args:
        expected: tensors of the model.
        come: names of those that have come.
    """

    def __init__(self, expected: Expected, come: Iterable[str] = ()) -> None:
        self._expected = expected
        self._come = set(come)

    def own_name(self, described: Described) -> str | None:
        """The model's name of a tensor; None if the model leaves it out.

        A tied model takes the LM head's tensor, too: the first of the two fills both.

        Raises:
            ValueError: naming the tensor, if the model has none of this name, shape or dtype, or if
                it has come before.
        """
        name = self._expected.own_names.get(described.name)
        if name is None:
            if self._expected.leaves_out(described.name):
                return None
            remedy = "pass the tensors by the names that the checkpoint has for them"
            if any(part in described.name for part in OF_PEFT):
                remedy = "merge the adapter first, or pass it alone to load_adapter()"
            raise ValueError(f"the model has no tensor {described.name}: {remedy}")
        is_head = name == HEAD and self._expected.is_tied
        wanted = self._expected.wanted[EMBEDDING if is_head else name]
        wanted.check(described.name, described.shape, described.dtype, SOURCE)
        if name in self._come:
            raise ValueError(f"tensor {described.name} comes twice in one update")
        return name

    def own_names(self, tensors: Iterable[Described], *, are_all: bool = False) -> list[str | None]:
        """The model's names of tensors that are known before any of them is written.

        Args:
            tensors: tensors that come together.
            are_all: whether no others come.

        Raises:
            ValueError: naming one that is wrong, or those that are missing.
        """
        trial = Ledger(self._expected, self._come)
        names = []
        for described in tensors:
            name = trial.own_name(described)
            names.append(name)
            trial.book([name])
        if are_all:
            trial.check_complete()
        return names

    def book(self, names: Iterable[str | None]) -> None:
        """Count tensors as come, by the model's names."""
        self._come.update(name for name in names if name is not None)

    @property
    def num_come(self) -> int:
        """Number of tensors that have come."""
        return len(self._come)

    def check_complete(self) -> None:
        """Refuse to end while tensors are missing.

        Raises:
            ValueError: naming them.
        """
        if missing := self._missing():
            raise ValueError(f"missing from the update: {listed(missing)}")

    def _missing(self) -> list[str]:
        come, wanted = self._come, self._expected.wanted
        if self._expected.is_tied and HEAD in come:
            come = come | {EMBEDDING}
        return sorted(n for n, facts in wanted.items() if not facts.is_optional and n not in come)
