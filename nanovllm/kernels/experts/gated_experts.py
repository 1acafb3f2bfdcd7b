"""The MLPs of a mixture of experts: each token's row by the weights of its experts.

A single token needs no sorting (`products/row.py`). For others, pairs of a token and an expert are
sorted (`routing.py`), and multiplied by tiles (`grouped.py`); by weights of 4 bits, on Hopper, in
`hopper_experts.py`.

With weights in FP8 the tokens are quantised, too, and so are the inner values, by the kernel that
has them. Where tensor cores have no FP8, or scale blocks do not fit tiles, weights are converted to
16 bits on their way to them.

Letters: T tokens, k experts of each, E experts, M hidden size, I inner size.
"""

import torch

from nanovllm.kernels.device_features import can_describe, has_own_kernels
from nanovllm.kernels.experts.grouped import grouped
from nanovllm.kernels.experts.routing import sort_pairs
from nanovllm.kernels.experts.tiles import Tiles
from nanovllm.kernels.experts.weights import ExpertWeights
from nanovllm.kernels.products.linear import HALF
from nanovllm.kernels.products.row import one_row
from nanovllm.tensors.fp8 import Codes
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.mxfp4 import Mxfp4Codes

LARGE_STEP = 1024  # rows from which partial results are rounded
ALIKE = 16  # pairs of an expert, whose tiles multiply any number of them; not tuned
# Pairs of an expert up to which tiles are faster on Hopper (measured on an H100).
FEW_PAIRS: dict[type, int] = {Int4Codes: 12, Mxfp4Codes: 40}


def gated_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    experts: torch.Tensor,
    scales: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`scale * down(act(gate(x)) * up(x))` for each of a token's experts.

    Args:
        x: [T, M]
        weights: experts of the layer.
        experts: [T, k] int32, see `route`.
        scales: [T, k] float32.
        tiles: tiles of the products; None: chosen here.

    Returns:
        [k, T, M], partial results to be summed over k: float32, or x's dtype in large steps.
    """
    k, E = experts.shape[1], weights.num_experts
    gate_up, down = weights.gate_up, weights.down
    plain = torch.Tensor | Codes
    if len(x) == 1 and x.dtype in HALF and isinstance(gate_up, plain) and isinstance(down, plain):
        inner = one_row(
            x, gate_up, weights.gate_up_bias, gated=True, gelu=weights.gelu, limit=weights.limit,
            num_experts=E, experts=experts,
        )  # fmt: skip
        return one_row(
            inner, down, weights.down_bias, num_experts=E, experts=experts, scales=scales
        )
    # In large steps partial results are rounded, to write fewer bytes.
    dtype = torch.float32 if len(x) < LARGE_STEP else x.dtype
    out = torch.empty(k, *x.shape, dtype=dtype, device=x.device)
    if tiles is None and takes_hopper_kernel(x, weights, k):
        _by_hopper(x, weights, experts, scales, out)
    else:
        order, starts = sort_pairs(experts, E) if len(x) > 1 else (None, experts)
        grouped(x, weights, order, starts, scales, out, tiles)
    return out


def experts_by_fixed_tiles(
    x: torch.Tensor, weights: ExpertWeights, experts: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """`gated_experts`, each token alike, whatever their number: [k, T, M] float32."""
    out = torch.empty(experts.shape[1], *x.shape, dtype=torch.float32, device=x.device)
    order, starts = sort_pairs(experts, weights.num_experts)
    grouped(x, weights, order, starts, scales, out, pairs_per_expert=ALIKE)
    return out


def takes_hopper_kernel(x: torch.Tensor, weights: ExpertWeights, k: int) -> bool:
    """Whether `hopper_experts` multiplies x: [T, M] by k of these experts for each row. A few rows
    of an expert are faster by tiles, of which a multiprocessor has several at once.
    """
    gate_up, down = weights.gate_up, weights.down
    few = FEW_PAIRS.get(type(gate_up), 0) * weights.num_experts
    if len(x) == 0 or (len(x) > 1 and len(x) * k <= few):
        return False
    if isinstance(gate_up, Int4Codes) and isinstance(down, Int4Codes):
        fits = {gate_up.plane, down.plane} <= {32, 64}
    else:
        fits = isinstance(gate_up, Mxfp4Codes) and isinstance(down, Mxfp4Codes)
        fits = fits and x.dtype == torch.bfloat16
    described = len(x) > 1 or can_describe(x)  # a single row is not copied
    return fits and described and x.dtype in HALF and has_own_kernels(x)


def _by_hopper(
    x: torch.Tensor,
    weights: ExpertWeights,
    experts: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    from nanovllm.kernels.experts.hopper_experts import hopper_experts

    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, Int4Codes | Mxfp4Codes) and isinstance(down, Int4Codes | Mxfp4Codes)
    biases = weights.gate_up_bias, weights.down_bias
    hopper_experts(x, gate_up, down, biases, weights.gelu, weights.limit, experts, scales, out)
