"""Gated DeltaNet in plain PyTorch: the CPU path, and the fallback where the kernels cannot run.

A value head's state S [V, K] float32 maps keys to values. A token with query q, key k (both of
length 1), value v, decay g <= 0 and step beta changes and reads it by the gated delta rule (Yang,
Kautz and Hatamizadeh, Gated Delta Networks, 2024):

    S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q

Prompts take CHUNK tokens at a time (the same paper, section 3.3, and Yang et al., Parallelizing
Linear Transformers with the Delta Rule over Sequence Length, 2024). G is the running sum of g in
the chunk, rows are tokens, S is the state before the chunk:

    A_ij = beta_i exp(G_i - G_j) k_i.k_j for j < i
    (I + A) U = diag(beta) V;  (I + A) W = diag(beta exp(G)) K
    D = U - W S^T
    O = diag(exp(G)) Q S^T + (Q K^T * exp(G_i - G_j) for j <= i) D
    S <- exp(G_C) S + D^T diag(exp(G_C - G)) K

All numbers are float32, but for G: where g is very negative, differences of its float32 sums would
be as wrong as the sums.

Letters: see `nanovllm.tensors.delta_net`; D decodes, T tokens of P prompts; N chunks of CHUNK.
"""

import torch
import torch.nn.functional as F

from nanovllm.recurrent import causal_conv
from nanovllm.tensors.delta_net import DeltaNet, DeltaState

CHUNK = 64
QK_EPS = 1e-6  # added to the sum of squares that normalises queries and keys


def decode(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaNet,
    state: DeltaState,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """One token of each of D sequences; their states move on by it.

    Args:
        mixed: [D, C + Hv V]: q (Hk K), k (Hk K), v (Hv V), the inputs of the convolution; z (Hv V).
        ba: [D, 2 Hv]: b, then a.
        layer: parameters.
        state: states, of which the rows of these sequences change.
        slots: [D] int32, row of each sequence's state.
        context_lens: [D] int32, number of tokens of each sequence, this one included. At 1 its
            state counts as zeros, whatever its row has. At 0 it is padding: its state is row 0,
            which no sequence has.

    Returns:
        [D, Hv V], like mixed; 0 in padding.
    """
    C = layer.conv.shape[0]
    x = causal_conv.decode(mixed[:, :C], layer.conv, state.tail, slots, context_lens)
    q, k, v = _heads(x, layer, state)
    beta, g = _gates(ba, layer)  # [D, Hv]
    rows = causal_conv.rows_of(slots, context_lens)
    begins = (context_lens <= 1)[:, None, None, None]
    S = state.memory[rows].masked_fill_(begins, 0)  # [D, Hv, V, K]
    S *= g.exp()[..., None, None]
    d = beta.unsqueeze(-1) * (v - (S @ k.unsqueeze(-1)).squeeze(-1))
    S += d.unsqueeze(-1) * k.unsqueeze(-2)
    state.memory[rows] = S
    out = _gated_norm((S @ q.unsqueeze(-1)).squeeze(-1), mixed[:, C:], layer)
    return out.masked_fill_((context_lens == 0)[:, None], 0)


def prompts(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaNet,
    state: DeltaState,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> torch.Tensor:
    """Tokens of P prompts, or of chunks of them; their states move on by these.

    Args:
        mixed, ba, layer, state: as of `decode`, with T rows: those of a prompt are adjacent.
        slots: [P] int32, row of each prompt's state; not used where a prompt has no tokens here.
        cu_seqlens_q: [P + 1] int32, first row of each prompt, from 0. Rows from the last on are
            padding.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths. A prompt with as many
            tokens as rows begins here: its state counts as zeros, whatever its row has.

    Returns:
        [T, Hv V], like mixed; 0 in padding.
    """
    C = layer.conv.shape[0]
    out = torch.zeros_like(mixed[:, C:])
    bounds = slots, cu_seqlens_q, cu_seqlens_k
    x = causal_conv.prompts(mixed[:, :C], layer.conv, state.tail, *bounds)
    for row, own, begins in causal_conv.spans(*bounds):
        if begins:
            state.memory[row] = 0
        q, k, v = _heads(x[own], layer, state)
        o = _chunks(q, k, v, *_gates(ba[own], layer), state.memory[row])
        out[own] = _gated_norm(o, mixed[own, C:], layer)
    return out


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    S: torch.Tensor,
) -> torch.Tensor:
    """The outputs [n, Hv, V] of n tokens: q, k [n, Hv, K], v [n, Hv, V], beta, g [n, Hv]. The state
    S [Hv, V, K] moves on.
    """
    n = len(q)
    size = min(CHUNK, n)
    # [Hv, N, size, ...]. Tokens of padding change nothing: their beta and g are 0.
    q, k, v, beta, g = (_in_chunks(x, size) for x in (q, k, v, beta, g))
    G = g.double().cumsum(-1)
    since = (G.unsqueeze(-1) - G.unsqueeze(-2)).float()  # [Hv, N, size, size]: from j to i
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = since.masked_fill_(~earlier, -torch.inf).exp_()
    beta, total, left = beta.unsqueeze(-1), G.float().exp(), (G[..., -1:] - G).float().exp()
    A = beta * decay * (k @ k.mT)  # its diagonal and the part above are not read
    both = torch.cat([beta * v, beta * total.unsqueeze(-1) * k], -1)
    both = torch.linalg.solve_triangular(A, both, upper=False, unitriangular=True)
    U, W = both.split([v.shape[-1], k.shape[-1]], -1)
    within = decay * (q @ k.mT)
    from_start, to_end = q * total.unsqueeze(-1), k * left.unsqueeze(-1)
    o = torch.empty_like(v)
    for j in range(v.shape[1]):
        d = U[:, j] - W[:, j] @ S.mT
        o[:, j] = from_start[:, j] @ S.mT + within[:, j] @ d
        S *= total[:, j, -1, None, None]
        S += d.mT @ to_end[:, j]
    return o.flatten(1, 2)[:, :n].transpose(0, 1)


def _in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """x: [n, Hv, ...] as [Hv, N, size, ...], with zeros at the end."""
    spare = -len(x) % size
    x = torch.cat([x, x.new_zeros(spare, *x.shape[1:])]) if spare else x
    return x.transpose(0, 1).unflatten(1, (-1, size))


def _heads(
    x: torch.Tensor, layer: DeltaNet, state: DeltaState
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k: [n, Hv, K], of length 1 and q then scaled by K^-0.5, and v: [n, Hv, V], from
    x: [n, C], the results of the convolution.
    """
    Hk, (Hv, V, K) = layer.num_key_heads, state.memory.shape[1:]
    q, k, v = F.silu(x).split([Hk * K, Hk * K, Hv * V], -1)
    # PyTorch's `normalize` bounds the length from below instead.
    q, k = (y.unflatten(-1, (Hk, K)) for y in (q, k))
    q, k = (y * (y.square().sum(-1, keepdim=True) + QK_EPS).rsqrt() for y in (q, k))
    q, k = (y.repeat_interleave(Hv // Hk, -2) for y in (q * K**-0.5, k))
    return q, k, v.unflatten(-1, (Hv, V))


def _gates(ba: torch.Tensor, layer: DeltaNet) -> tuple[torch.Tensor, torch.Tensor]:
    """beta and g: [n, Hv] float32."""
    b, a = ba.float().chunk(2, -1)
    return b.sigmoid(), -layer.A_log.exp() * F.softplus(a + layer.dt_bias)


def _gated_norm(o: torch.Tensor, z: torch.Tensor, layer: DeltaNet) -> torch.Tensor:
    """The outputs o: [n, Hv, V] of the heads normalised, by their gates z: [n, Hv V]."""
    o = o * (o.square().mean(-1, keepdim=True) + layer.eps).rsqrt()
    return (layer.norm * o * F.silu(z.float().unflatten(-1, o.shape[1:]))).flatten(1).to(z.dtype)
