"""`RopeParameters`: the rotary embedding of a layer, read from config.json. Imports no torch.

Names are those of `rope_parameters` (transformers 5) and `rope_scaling` (transformers 4) there.
"""

import math
from dataclasses import dataclass
from typing import Any

from nanovllm.checkpoint.files import MOST, read_value

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
OTHER_NAMES = {"su": "longrope"}  # Phi-3's first checkpoints; others of them say "yarn"
RATIO = 1e-3, 1e6  # bounds of factors on frequencies


@dataclass(frozen=True)
class RopeParameters:
    """The rotation of queries and keys by position; `layers.rope_frequencies` has the formulas.

    Attributes:
        rope_theta: base of the wavelengths.
        rotary_dim: number of leading dimensions of a head that are rotated.
        rope_type: one of `ROPE_TYPES`, or "none": this layer has no rotation.
        interleaved: whether dimensions are paired with their neighbours, not i with
            i + rotary_dim / 2.
        factor: ratio by which the context is extended.
        original_max_position_embeddings: length of the context before that, in tokens.
        attention_factor: multiplier of sines and cosines.
        low_freq_factor, high_freq_factor: parameters of "llama3".
        beta_fast, beta_slow, truncate: parameters of "yarn".
        short_factor, long_factor: divisors of frequency in "longrope", one per pair.
        llama_4_scaling_beta: growth of queries with the logarithm of their position; 0: none.
    """

    rope_theta: float
    rotary_dim: int
    rope_type: str = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0

    @property
    def max_position_embeddings(self) -> int:
        """Context in tokens of a scaling added by hand, which config.json itself may not state."""
        if self.rope_type not in ("dynamic", "yarn"):
            return 0
        return min(int(self.factor * self.original_max_position_embeddings), MOST)

    def is_stretched(self, num_positions: int) -> bool:
        """Whether `num_positions` exceed the original context, if the scaling depends on the length
        of a text.
        """
        goes_by_length = self.rope_type in ("dynamic", "longrope")
        return goes_by_length and num_positions > self.original_max_position_embeddings


def read_rope(raw: dict[str, Any], kind: str, head_dim: int, interleaved: bool) -> RopeParameters:
    """The rotary embedding of all layers of one kind.

    Args:
        raw: config.json, with the family's defaults.
        kind: "full_attention" or "sliding_attention", which some files tell apart.
        head_dim: size of a head, D.
        interleaved: whether pairs are neighbours (see `RopeParameters`).

    Raises:
        ValueError: naming the key that is missing, wrong or not supported.
    """
    given = _merged(raw, kind)
    rope_type = _rope_type(given)
    theta = read_value(given, "rope_theta", float, maximum=1e30)
    share = read_value(given, "partial_rotary_factor", float, 1.0, RATIO[0], 1)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not rotary_dim:
        raise ValueError(
            "config.json: `partial_rotary_factor` of RoPE must select an even number of dimensions "
            f"of `head_dim` {head_dim}, got {share}"
        )
    scaling = _scaling(raw, given, rope_type, rotary_dim)
    return RopeParameters(theta, rotary_dim, rope_type, interleaved, **scaling)


def _merged(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """All that config.json says of RoPE, wherever it stands. A scaling beside `rope_parameters` was
    added by hand, as model cards recommend, and counts.
    """
    found = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: `{key}` must be an object, got {rope!r}")
        own = rope.get(kind, {} if any(isinstance(v, dict) for v in rope.values()) else rope)
        if not isinstance(own, dict):
            raise ValueError(f"config.json: `{key}` must have an object for {kind}, got {own!r}")
        for part in (rope, *rope.values()):  # those of other kinds, too: nothing is skipped
            if isinstance(part, dict):
                _rope_type(part, key)
        found |= {name: value for name, value in own.items() if value is not None}
        if "type" in own or "rope_type" in own:
            found["rope_type"] = _rope_type(own, key)
    return found


def _rope_type(rope: dict[str, Any], key: str = "rope_parameters") -> str:
    name = rope.get("rope_type", rope.get("type")) or "default"
    name = OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if name == "yarn" and "long_factor" in rope:
        name = "longrope"
    if name not in ROPE_TYPES:
        raise ValueError(
            f"RoPE scaling {name!r} is not supported, only {', '.join(ROPE_TYPES)}: config.json "
            f"has it as `{key}`"
        )
    return name


def _scaling(
    raw: dict[str, Any], given: dict[str, Any], rope_type: str, rotary_dim: int
) -> dict[str, Any]:
    """The fields of `RopeParameters` that its type needs."""
    beta = read_value(given, "llama_4_scaling_beta", float, 0.0, 0, RATIO[1])
    longest = read_value(raw, "max_position_embeddings", int)
    original = _original_length(raw, given, rope_type, longest)
    values: dict[str, Any] = {"llama_4_scaling_beta": beta}
    if rope_type != "default" or beta:
        values["original_max_position_embeddings"] = original
    implied_factor = max(1.0, longest / original)
    if rope_type in ("linear", "dynamic"):
        values["factor"] = _extension_factor(given)
    elif rope_type == "llama3":
        values |= _llama3(given)
    elif rope_type == "yarn":
        values |= _yarn(given, implied_factor)
    elif rope_type == "longrope":
        values |= _longrope(given, implied_factor, original, rotary_dim // 2)
    return values


def _original_length(
    raw: dict[str, Any], given: dict[str, Any], rope_type: str, longest: int
) -> int:
    """The length of the context before it was extended, in tokens."""
    key = "original_max_position_embeddings"
    # The key at the top of the file, as in Phi-3, takes precedence.
    source = given if raw.get(key) is None else raw
    original = read_value(source, key, int, max(longest, 2), minimum=2)
    if rope_type == "dynamic":  # as transformers reads it
        return max(longest, 2)
    return original


def _extension_factor(given: dict[str, Any], implied: float | None = None) -> float:
    """The ratio by which the context is extended; required if none is implied."""
    return read_value(given, "factor", float, implied, 1, RATIO[1])


def _llama3(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of "llama3"."""
    factor = _extension_factor(given)
    low = read_value(given, "low_freq_factor", float, None, *RATIO)
    high = read_value(given, "high_freq_factor", float, None, *RATIO)
    if low >= high:
        raise ValueError(
            "config.json: `low_freq_factor` of RoPE must be below `high_freq_factor`, got "
            f"{low} and {high}"
        )
    return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}


def _yarn(given: dict[str, Any], implied_factor: float) -> dict[str, Any]:
    """The fields of "yarn"."""
    factor = _extension_factor(given, implied_factor)
    beta_fast = read_value(given, "beta_fast", float, 32.0, *RATIO)
    beta_slow = read_value(given, "beta_slow", float, 1.0, *RATIO)
    truncate = read_value(given, "truncate", bool, True)
    implied = _yarn_attention_factor(given, factor)
    return {
        "factor": factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
        "attention_factor": read_value(given, "attention_factor", float, implied, *RATIO),
    }


def _longrope(
    given: dict[str, Any], implied_factor: float, original: int, num_pairs: int
) -> dict[str, Any]:
    """The fields of "longrope" for a rotation of `num_pairs` pairs of dimensions."""
    factor = _extension_factor(given, implied_factor)
    short_factor = _read_factors(given, "short_factor", num_pairs)
    long_factor = _read_factors(given, "long_factor", num_pairs)
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factor": factor,
        "short_factor": short_factor,
        "long_factor": long_factor,
        "attention_factor": read_value(given, "attention_factor", float, implied, *RATIO),
    }


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    """YaRN's factor (Peng et al., 2023), with DeepSeek's `mscale`s if both are given and not 0."""
    above, below = (
        read_value(given, key, float, 0.0, 0, RATIO[1]) for key in ("mscale", "mscale_all_dim")
    )
    if not above or not below:
        above, below = 1.0, 0.0
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (above * growth + 1) / (below * growth + 1)


def _read_factors(given: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    values = given.get(key)
    if not isinstance(values, list) or len(values) != count:
        size = f"{len(values)} values" if isinstance(values, list) else repr(values)
        raise ValueError(f"config.json: `{key}` of RoPE must be {count} numbers, got {size}")
    return tuple(read_value({key: value}, key, float, None, *RATIO) for value in values)
