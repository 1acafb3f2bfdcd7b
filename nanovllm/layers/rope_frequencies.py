"""`frequencies`: the angles by which RoPE rotates the pairs of a head, with all of its scalings."""

import math

import torch

from nanovllm.checkpoint.rope import RopeParameters


def frequencies(rope: RopeParameters, num_positions: int) -> torch.Tensor:
    """The rotation of each pair from one position to the next, in radians: [rotary_dim / 2]
    float32.

    - "default": theta^(-2i/R).
    - "linear" (Chen et al., 2023): divided by the factor.
    - "dynamic" (bloc97 and emozilla, 2023): theta grows with the context, here the longest that the
      engine allows (`num_positions`), as in vLLM; transformers uses the sequence's own length.
      Cached keys are rotated once, so they cannot follow a sequence that grows.
    - "llama3" (Grattafiori et al., 2024): divided by the factor if a pair makes fewer than
      `low_freq_factor` rotations within the original context, kept if it makes more than
      `high_freq_factor`, interpolated between these.
    - "yarn" (Peng et al., 2023): divided or kept likewise, interpolated by the pair's index.
    - "longrope" (Ding et al., 2024): each divided by its own factor, from one set if
      `num_positions` is within the original context, from another if it is beyond, as in vLLM;
      transformers uses the sequence's own length.
    """
    R, theta, original = rope.rotary_dim, rope.rope_theta, rope.original_max_position_embeddings
    is_stretched = rope.is_stretched(num_positions)
    if rope.rope_type == "dynamic" and is_stretched:
        theta *= (rope.factor * num_positions / original - (rope.factor - 1)) ** (R / (R - 2))
    plain = 1.0 / theta ** (torch.arange(0, R, 2, dtype=torch.float32) / R)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return _between(plain, rope.factor, ((turns - low) / (high - low)).clamp(0, 1))
    if rope.rope_type == "yarn":
        return _between(plain, rope.factor, 1 - _yarn_ramp(rope))
    if rope.rope_type == "longrope":
        factors = rope.long_factor if is_stretched else rope.short_factor
        own = torch.tensor(factors, dtype=torch.float32)
        return 1.0 / (own * theta ** (torch.arange(0, R, 2).float() / R))
    return plain


def _between(plain: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    return plain * (kept + (1 - kept) / factor)


def _yarn_ramp(rope: RopeParameters) -> torch.Tensor:
    """The place of each pair between `beta_fast` rotations within the original context (0) and
    `beta_slow` (1): [rotary_dim / 2] float32.
    """
    R = rope.rotary_dim
    context = rope.original_max_position_embeddings / (2 * math.pi)
    first, last = (
        R * math.log(context / beta) / (2 * math.log(rope.rope_theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    steps = torch.arange(R // 2, dtype=torch.float32) - first
    return (steps / max(last - first, 1e-3)).clamp(0, 1)
