"""`Updatable`: an engine's methods to change its weights and to lend its memory."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nanovllm.adapters.adapter import Given, open_adapters
from nanovllm.adapters.directory import warn_of_templates
from nanovllm.adapters.given import AnyAdapter, read_given
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.models.loader import check_adapters, check_files
from nanovllm.updates.hold import Hold, Version
from nanovllm.updates.sharing import read_message
from nanovllm.updates.sleeping import TAGS, Sleeping
from nanovllm.updates.updating import NO_ADAPTER, Tensors, WeightUpdates, check_tensors
from nanovllm.utils.checks import check_choice, check_int
from nanovllm.utils.options import Absent, Foreign, only, takes_foreign

FOREIGN_UPDATE: Foreign = {
    "update_info": (
        only(),
        "pass the tensors themselves to update_weights(), or what share_weights() has given in "
        "another process to update_weights_ipc()",
    ),
    "weight_version": (only(None), "pass it as `version`"),
}
FOREIGN_FINISH: Foreign = {"version": (only(None), "pass it as `weight_version`")}
FOREIGN_START: Foreign = {
    "is_checkpoint_format": (only(True), "tensors have the checkpoint's names and shapes"),
}
FOREIGN_SLEEP: Foreign = {
    "mode": (only("keep"), "leave it out: an AsyncLLM keeps requests that run, an LLM has none"),
}


class NamesOfVllm:
    """The methods of vLLM's engines that change weights by other names."""

    init_weight_transfer_engine = Absent(
        "nothing is initialised; pass tensors to update_weights(), or what share_weights() has "
        "given in another process to update_weights_ipc()"
    )
    reload_weights = Absent(
        "unload_adapter() fills the weights from the checkpoint again, update_weights() from "
        "tensors"
    )
    update_weight_version = Absent(
        "pass it to update_weights() as `version`, or to finish_weight_update() as `weight_version`"
    )
    add_lora = Absent("load_adapter() merges a LoRA adapter into the weights")
    remove_lora = Absent("unload_adapter() fills the weights from the checkpoint again")
    list_loras = Absent('metrics()["adapter"] names the adapters that the weights have')
    collective_rpc = Absent("update_weights(), sleep() and wake_up() reach all ranks")
    apply_model = Absent("update_weights() and load_adapter() change the model on all ranks")
    model_executor = Absent("update_weights() takes a learner's tensors, for all ranks")
    pause_generation = Absent(
        "update_weights() and sleep() let the engine finish its step; start_weight_update() has it "
        "compute nothing until finish_weight_update()"
    )
    resume_generation = Absent("finish_weight_update() and wake_up() have the engine go on")


class Updatable(NamesOfVllm, ABC):
    """The methods of `LLM` for weights that change and memory that is lent.

    Attributes:
        config: options of the engine.
        model_config: facts of its model.
    """

    config: Config
    model_config: ModelConfig
    _hold: Hold
    _updates: WeightUpdates
    _sleeping: Sleeping

    @abstractmethod
    def _changing_memory(self) -> AbstractContextManager[None]:
        """Refuse, or have nothing computed during the block."""

    @takes_foreign(FOREIGN_UPDATE)
    def update_weights(self, tensors: Tensors, *, version: Version | None = None) -> None:
        """Replace all weights, in place, in milliseconds. Cached prefixes are forgotten.

        Without `start_weight_update` this is a whole update: all tensors of the model must come,
        once. Of a dictionary or list all names, shapes and dtypes are checked before anything is
        written; of another iterable each tensor is when it comes. If an update fails half-way, the
        engine refuses to compute until a complete one, or `unload_adapter`.

        After `start_weight_update` it writes some of the tensors; `finish_weight_update` ends that.
        If a call is refused before it has written anything, the update goes on without it.

        Args:
            tensors: pairs of a name and a whole tensor, or a dictionary: the names are those of the
                checkpoint (`model.layers.0.self_attn.q_proj.weight`) or of its model in
                transformers 5, in any order, of 16, 32 or 64 floating-point bits, on the CPU or a
                GPU. Weights that are quantised while they are loaded are so here, too; those of a
                quantised checkpoint are replaced by tensors of the same format. A tied LM head may
                come or not.
            version: version of the new weights, an integer or a string; None: the next number, one
                more than the largest so far. Updates with versions of their own, and adapters that
                are loaded or unloaded, take a number, too.

        Raises:
            TypeError, ValueError: naming the tensor that is wrong, or those that are missing.
            RuntimeError: if requests are left, or inside the iterable of another update.
        """
        check_tensors(tensors)
        with self._changing_memory():
            if not self._updates.has_started:
                self._updates.update(tensors, version)
                return
            _refuse_version(version)
            self._updates.add(tensors)

    @takes_foreign(FOREIGN_UPDATE)
    def update_weights_ipc(
        self, message: Mapping[str, Any], *, version: Version | None = None
    ) -> None:
        """`update_weights` by tensors that another process of this machine shares, on the CPU or on
        a GPU (CUDA IPC).

        Args:
            message: result of `nanovllm.share_weights` there.
            version: as for `update_weights`.

        Raises:
            TypeError, ValueError: as `update_weights`; also if it is no such message.
            RuntimeError: as `update_weights`; also if the memory cannot be opened.
        """
        parcel = read_message(message)
        with self._changing_memory():
            if not self._updates.has_started:
                self._updates.update_by(parcel, version)
                return
            _refuse_version(version)
            self._updates.add_parcel(parcel)

    @takes_foreign(FOREIGN_START)
    def start_weight_update(self) -> None:
        """Begin an update of several calls of `update_weights`. One that has begun is forgotten.

        It cannot be cancelled: until a complete update, or `unload_adapter`, nothing is computed.

        Raises:
            RuntimeError: if requests are left.
        """
        with self._changing_memory():
            self._updates.start()

    @takes_foreign(FOREIGN_FINISH)
    def finish_weight_update(self, weight_version: Version | None = None) -> None:
        """End an update of several calls.

        Args:
            weight_version: `version` of `update_weights`, by vLLM's name.

        Raises:
            ValueError: naming tensors that have not come; go on with them.
            RuntimeError: if no update has begun.
        """
        with self._changing_memory():
            self._updates.finish(weight_version)

    def load_adapter(self, adapter: AnyAdapter | Sequence[AnyAdapter]) -> None:
        """Fill the weights from the checkpoint again, with a LoRA adapter of peft merged into it.

        It takes the place of others. The sum is made in float32 and rounded once; nothing is ever
        subtracted. docs/reference/adapters.md says what can be merged.

        Args:
            adapter: its directory or name on the hub, or its configuration (peft's `LoraConfig`, or
                the object in adapter_config.json) and tensors by peft's names
                (`get_peft_model_state_dict(model)`); or a list of these, which are merged one after
                the other.

        Raises:
            TypeError, ValueError: naming what cannot be merged, before anything is written.
            RuntimeError: if requests are left.
        """
        given = read_given(adapter)
        self._reload([each for each, _ in given], ", ".join(name for _, name in given))

    def unload_adapter(self) -> None:
        """Fill the weights from the checkpoint again, without any adapter.

        Raises:
            ValueError: if they were not read from one, or its files are not there any more.
            RuntimeError: if requests are left.
        """
        self._reload([], NO_ADAPTER)

    def _reload(self, adapters: Sequence[Given], name: str) -> None:
        if self.config.load_format == "dummy":
            raise ValueError(
                "load_format='dummy' reads no checkpoint, which adapters change and "
                "unload_adapter() reads again"
            )
        directory = Path(self.config.model)
        check_files(directory)
        check_adapters(open_adapters(adapters), directory, self.model_config)
        warn_of_templates((each for each in adapters if isinstance(each, str)), directory)
        with self._changing_memory():
            self._updates.reload(adapters, name)

    @property
    def weight_version(self) -> Version:
        """The version of the weights: 0 for those of the checkpoint, and what the last update
        says, or the next number.
        """
        return self._hold.version

    def get_weight_version(self) -> Version:
        """`weight_version`, as vLLM calls it."""
        return self.weight_version

    @takes_foreign(FOREIGN_SLEEP)
    def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory back, for others, until `wake_up`. Needs `enable_sleep_mode`.

        The slow parts of a start stay: processes, compiled kernels, CUDA graphs. Cached prompts are
        forgotten.

        Args:
            level: 1 keeps the weights in host memory (pinned, and kept for the next time: the first
                sleep takes seconds); 2 drops them, and `update_weights` must bring new ones. On a
                CPU, where the weights are in host memory, 1 drops the KV cache alone.

        Raises:
            TypeError, ValueError: for another level, or without `enable_sleep_mode`.
            RuntimeError: if requests are left.
        """
        check_int("level", level, 1, 2)
        with self._changing_memory():
            if not self.config.enable_sleep_mode:
                raise ValueError("sleep() needs an engine built with enable_sleep_mode=True")
            self._updates.check_idle()
            self._sleeping.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again that `sleep` has given back. The rest is left as it is.

        Args:
            tags: list of "weights" and "kv_cache", or of one of them: new weights need no KV cache
                yet. None: both.

        Raises:
            TypeError, ValueError: if it is no list, or for another tag.
            torch.OutOfMemoryError: if there is no memory; the missing part sleeps on.
        """
        if tags is not None and (isinstance(tags, str) or not isinstance(tags, Collection)):
            hint = f": pass [{tags!r}]" if tags in TAGS else ""
            raise TypeError(f"`tags` must be a list of tags, got {tags!r}{hint}")
        for tag in tags or ():
            check_choice("tags", tag, TAGS)
        with self._changing_memory():
            self._sleeping.wake(tags)

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache have no memory."""
        return bool(self._sleeping.asleep)


def _refuse_version(version: object) -> None:
    if version is not None:
        raise ValueError(
            "`version` must be None between start_weight_update() and finish_weight_update(), "
            f"which takes it, got {version!r}"
        )
