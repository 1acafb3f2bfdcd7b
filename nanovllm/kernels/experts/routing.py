"""Routing: the experts of each token, and the pairs of a token and an expert sorted by expert.

Pairs are numbered n = token * k + j. They are sorted on the device by counting, with one program
per expert.

Letters: T tokens, k experts of each, E experts.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.utils.integers import next_power_of_2

SORTED = 256, 2048, 4096  # pairs that a program of `_sort_kernel` handles together
LEAST = tl.constexpr(-3e38)


@triton.jit
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: the K likeliest experts of one token, and the shared one, if there is one.
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    wait(PDL)
    logits_ptr += row * (E + SHARED)
    logits = tl.load(logits_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    # No score is below LEAST, not even NaN: so each choice is one expert, and another one.
    logits = tl.where(e < E, tl.where(logits > LEAST, logits, LEAST), float("-inf"))
    most = tl.max(logits, 0)
    left = logits
    total = 0.0
    for j in tl.static_range(K):
        score, expert = tl.max(left, 0, return_indices=True)
        tl.store(experts_ptr + row * (K + SHARED) + j, expert)
        total += tl.exp(score - most)
        left = tl.where(e == expert, float("-inf"), left)
    if not NORM:
        total = tl.sum(tl.exp(logits - most), 0)
    chosen = left != logits
    taken = tl.where(chosen, logits, float("-inf"))
    for j in tl.static_range(K):  # again, now that the sum is known
        score, expert = tl.max(taken, 0, return_indices=True)
        tl.store(weights_ptr + row * (K + SHARED) + j, tl.exp(score - most) / total)
        taken = tl.where(e == expert, float("-inf"), taken)
    if SHARED:
        tl.store(experts_ptr + row * (K + 1) + K, E)
        tl.store(
            weights_ptr + row * (K + 1) + K, tl.sigmoid(tl.load(logits_ptr + E).to(tl.float32))
        )


@triton.jit(do_not_specialize=["N"])
def _sort_kernel(
    ids_ptr, order_ptr, starts_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    # One program: the pairs of one expert, in their order, after those of all experts before it.
    launch_dependents(PDL)
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    wait(PDL)
    start = 0
    for begin in range(0, N, BLOCK):
        ids = tl.load(ids_ptr + begin + offsets, mask=begin + offsets < N, other=1 << 30)
        start += tl.sum((ids < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, start)
    for begin in range(0, N, BLOCK):
        ids = tl.load(ids_ptr + begin + offsets, mask=begin + offsets < N, other=1 << 30)
        own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(own, 0) - 1, begin + offsets, mask=own > 0)
        start += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, start)


def route(
    logits: torch.Tensor, k: int, norm: bool, has_shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's k likeliest experts [T, k] int32, the likeliest first, and their
    probabilities [T, k] float32; `norm` divides these by their sum.

    Args:
        logits: [T, E]; with a shared expert [T, E + 1].
        has_shared: whether there is an expert E that all tokens choose, as one more than k, by the
            sigmoid of the last logit.
    """
    T, E = logits.shape[0], logits.shape[1] - has_shared
    experts = torch.empty(T, k + has_shared, dtype=torch.int32, device=logits.device)
    weights = torch.empty(T, k + has_shared, dtype=torch.float32, device=logits.device)
    _route_kernel[(T,)](
        logits.contiguous(), experts, weights,
        E=E, E_PAD=next_power_of_2(E), K=k, NORM=norm, SHARED=int(has_shared),
        num_warps=1, **pdl_options(logits),
    )  # fmt: skip
    return experts, weights


def sort_pairs(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert, stably. Returns the pairs [T * k] int32, and the first of each expert
    [E + 1] int32.

    Args:
        experts: [T, k] int32, see `route`.
    """
    N, device = experts.numel(), experts.device
    order = torch.empty(N, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    BLOCK = next((size for size in SORTED if size >= N), SORTED[-1])
    _sort_kernel[(num_experts,)](
        experts, order, starts, N,
        BLOCK=BLOCK, num_warps=max(1, BLOCK // 512), **pdl_options(experts),
    )  # fmt: skip
    return order, starts
