"""`Ledger`: the tensors that an update of weights must bring, and has brought. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanovllm.checkpoint.names import (
    EMBEDDING,
    FLOATS,
    HEAD,
    OF_WRAPPERS,
    RENAMED,
    TOWER,
    WRAPPERS,
    Places,
    Wanted,
    has_tower,
    is_left_out,
    spellings,
)
from nanovllm.utils.checks import listed

SOURCE = "the model"
OF_TEXT = (  # the remedy for an update of the text model alone
    ": pass the checkpoint's own tensors of the part for images, too, or build the engine with "
    "language_model_only=True"
)
BY_NAME = "pass the tensors by the names that the checkpoint has for them"
OF_PEFT = "base_model.model.", ".base_layer.", ".lora_"  # in names of a PeftModel's tensors
MERGED = (
    "pass the merged tensors by the base model's names (docs/weights.md has the lines), or the "
    "adapter alone to load_adapter()"
)
OF_CODES = (
    "the checkpoint is quantised: pass tensors of its own format, or build the engine from the "
    'original weights, with quantization="fp8" if they are to be small'
)


class Piece(NamedTuple):
    """A tensor of the model, and the part of a given tensor that fills it.

    Attributes:
        name: the model's name.
        expert: number of the expert whose matrix it is; None: the given tensor as a whole.
        half: half of that matrix's rows that it is, 0 or 1; None: all rows.
        is_transposed: whether it is the transpose of each expert's matrix.
    """

    name: str
    expert: int | None = None
    half: int | None = None
    is_transposed: bool = False


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
    def pieces(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor, by all names that a checkpoint or a model of transformers may
        have for it: such a model stacks experts that the checkpoint has one by one.
        """
        found: dict[str, list[Piece]] = {}
        for own, places in self._places.stacks():
            found[own] = [Piece(place.name, place.expert, place.half) for place in places]
        for name in self.wanted:
            found[name.replace(*RENAMED)] = found[name] = [Piece(name)]
        if self.is_tied:
            found[HEAD] = [Piece(HEAD)]
        return {
            spelling: pieces
            for own, pieces in found.items()
            for spelling in spellings(own, self.is_part)
        }

    @cached_property
    def _places(self) -> Places:
        return Places(self.wanted)

    def wanted_of(self, pieces: list[Piece]) -> Wanted:
        """The requirements on a tensor of these pieces."""
        last = pieces[-1]
        wanted = self.wanted[EMBEDDING if last.name == HEAD and self.is_tied else last.name]
        if last.expert is None:
            return wanted
        rows, columns = wanted.shape
        num_experts = last.expert + 1
        return wanted._replace(shape=[num_experts, len(pieces) // num_experts * rows, columns])

    def has_transposes(self, name: str, shape: list[int], of_model: list[int]) -> bool:
        """Whether a tensor of this shape has the transposes of the matrices that a tensor of the
        model stacks. Qwen3-VL-MoE's published files have them as [inputs, outputs], and a model of
        transformers the other way; gpt-oss's are so in both.
        """
        if len(of_model) != 3 or shape != [of_model[0], of_model[2], of_model[1]]:
            return False
        [place] = self._places.find(name)
        return place.is_of_experts and not place.is_transposed and shape != of_model

    def in_codes(self, name: str) -> bool:
        """Whether the checkpoint has codes in the place of a tensor of this name."""
        return self._places.in_codes(name)

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

    def pieces(self, described: Described) -> list[Piece]:
        """The pieces of a tensor; none if the model leaves it out.

        A tied model takes the LM head's tensor, too: the first of the two fills both.

        Raises:
            ValueError: naming the tensor, if the model has none of this name, shape or dtype, or if
                it has come before.
        """
        name, shape, dtype = described
        pieces = self._expected.pieces.get(name)
        if pieces is None:
            if self._expected.leaves_out(name):
                return []
            raise ValueError(f"the model has no tensor {name}: {self._remedy(name)}")
        if 0 in shape:
            raise ValueError(
                f"tensor {name} has no values, as ZeRO-3 leaves parameters between its steps: "
                "gather it first"
            )
        wanted = self._expected.wanted_of(pieces)
        first = pieces[0]
        if first.expert is None and self._expected.has_transposes(first.name, shape, wanted.shape):
            pieces, shape = [first._replace(is_transposed=True)], wanted.shape
        if dtype in FLOATS and wanted.is_of_codes:
            raise ValueError(f"tensor {name} is {dtype}, but {OF_CODES}")
        wanted.check(name, shape, dtype, SOURCE)
        if any(piece.name in self._come for piece in pieces):
            raise ValueError(f"tensor {name} comes twice in one update")
        return pieces

    def _remedy(self, name: str) -> str:
        """The remedy for a tensor whose name the model lacks."""
        if any(part in name for part in OF_PEFT):
            return MERGED
        if found := OF_WRAPPERS.search(name):
            return f"pass state_dict() of the model inside the wrapper ({WRAPPERS[found[1]]})"
        if self._expected.in_codes(name):
            return OF_CODES
        return BY_NAME

    def all_pieces(
        self, tensors: Iterable[Described], *, are_all: bool = False
    ) -> list[list[Piece]]:
        """The pieces of tensors that are known before any of them is written.

        Args:
            tensors: tensors that come together.
            are_all: whether no others come.

        Raises:
            ValueError: naming one that is wrong, or those that are missing.
        """
        trial = Ledger(self._expected, self._come)
        found = []
        for described in tensors:
            pieces = trial.pieces(described)
            found.append(pieces)
            trial.book(pieces)
        if are_all:
            trial.check_complete()
        return found

    def book(self, pieces: Iterable[Piece]) -> None:
        """Count tensors of the model as come."""
        self._come.update(piece.name for piece in pieces)

    @property
    def num_come(self) -> int:
        """Number of tensors that have come."""
        return len(self._come)

    def check_complete(self) -> None:
        """Refuse to end while tensors are missing.

        Raises:
            ValueError: naming them.
        """
        if not self._come:
            raise ValueError("no tensor of the model has come (a generator can be read once)")
        if missing := self._missing():
            remedy = OF_TEXT if all(name.startswith(TOWER) for name in missing) else ""
            raise ValueError(f"missing from the update: {listed(missing)}{remedy}")

    def _missing(self) -> list[str]:
        come, wanted = self._come, self._expected.wanted
        if self._expected.is_tied and HEAD in come:
            come = come | {EMBEDDING}
        return sorted(n for n, facts in wanted.items() if not facts.is_optional and n not in come)
