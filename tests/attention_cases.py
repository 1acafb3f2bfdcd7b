"""Attention cases for all backends, over a pool of which everything else is NaN."""

import pytest
import torch

from nanovllm.attention.base import QKV, AttentionBackend
from nanovllm.attention.images import attend_in_images
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.images.stored import Span
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.image_rows import ImageRows
from nanovllm.tensors.kv_cache import KVCache, dequantize, quantize
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if HAS_CUDA else [torch.float32]
needs_hopper = pytest.mark.skipif(
    not HAS_CUDA or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.0",
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def poisoned_cache(shape: tuple[int, int, int, int], dtype: torch.dtype) -> KVCache:
    """NaN everywhere, and of FP8 exponents that make NaN of 0."""
    cache = KVCache.empty(shape, dtype, torch.device(DEVICE))
    for codes in cache[:2]:
        if dtype == FP8:
            codes.view(torch.uint8).fill_(0x7F)
        else:
            codes.fill_(torch.nan)
    for exponents in cache[2:]:
        if exponents is not None:
            exponents.fill_(-128)  # as no vector has
    return cache


def put(cache: KVCache, part: int, block: int, row: int, x: torch.Tensor) -> None:
    """Keys (part 0) or values (part 1) x: [Hkv, D] of a token into its place."""
    stored, exponents = cache[part], cache[2 + part]
    assert stored is not None
    if exponents is None:
        stored[block, row] = x
    else:
        stored[block, row], exponents[block, :, row] = quantize(x)


def _heads(n: int, hkv: int, d: int, dtype: torch.dtype, fp8: bool, seed: int) -> torch.Tensor:
    """[n, hkv, d]; of `fp8` numbers that it can hold, with many different exponents for values."""
    x = randn(n, hkv, d, seed=seed)
    if fp8:
        x *= 2.0 ** randn(n, hkv, 1, seed=seed + 100)
        x = dequantize(*quantize(x.to(dtype)), torch.float32)
    return x.to(dtype)


class Case:
    """A step over a scattered, poisoned pool: whatever no sequence owns is NaN. Keys and values in
    a pool of `fp8` are numbers that it can hold.
    """

    def __init__(
        self,
        q_lens: list[int],
        k_lens: list[int],
        *,
        num_decodes: int = 0,
        hq: int = 4,
        hkv: int = 2,
        d: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        fp8: bool = False,
        images: dict[int, list[tuple[int, int]]] | None = None,
    ) -> None:
        assert all(n == 1 for n in q_lens[:num_decodes])
        self.q_lens, self.k_lens = q_lens, k_lens
        own_sinks = randn(hq, dtype=dtype, seed=2) if sinks else None
        self.scoring = Scoring(1.2 * d**-0.5, window, softcap, own_sinks)
        widths = [-(-n // block_size) for n in k_lens]
        order = torch.randperm(sum(widths) + 3, generator=torch.Generator().manual_seed(3)).tolist()
        shape = (sum(widths) + 3, block_size, hkv, d)
        self.cache = poisoned_cache(shape, FP8 if fp8 else dtype)
        tables = torch.full((len(k_lens), max(widths) + 2), order.pop(), dtype=torch.int32)
        self.keys, self.values, slots = [], [], []
        for i, (n, length) in enumerate(zip(q_lens, k_lens, strict=True)):
            self.keys.append(_heads(length, hkv, d, dtype, fp8, seed=10 + i))
            self.values.append(_heads(length, hkv, d, dtype, fp8, seed=50 + i))
            blocks = [order.pop() for _ in range(widths[i])]
            tables[i, : widths[i]] = torch.tensor(blocks)
            where = [blocks[p // block_size] * block_size + p % block_size for p in range(length)]
            # Blocks older than the window are another sequence's by now.
            oldest = max(0, length - n - window + 1) // block_size if window else 0
            for p in range(oldest * block_size, length - n):
                block, row = where[p] // block_size, where[p] % block_size
                put(self.cache, 0, block, row, self.keys[i][p])
                put(self.cache, 1, block, row, self.values[i][p])
            slots += where[length - n :]
        self.q = randn(sum(q_lens), hq, d, dtype=dtype, seed=1)
        self.k = torch.cat([x[len(x) - n :] for x, n in zip(self.keys, q_lens, strict=True)])
        self.v = torch.cat([x[len(x) - n :] for x, n in zip(self.values, q_lens, strict=True)])
        zero = torch.zeros(1, dtype=torch.int64)
        cu_q, cu_k = (
            torch.cat([zero, torch.tensor(x[num_decodes:]).cumsum(0)]).to(DEVICE, torch.int32)
            for x in (q_lens, k_lens)
        )
        prefilling = q_lens[num_decodes:]
        self.context = Context(
            num_decodes=num_decodes,
            slot_mapping=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor(k_lens, dtype=torch.int32, device=DEVICE),
            block_tables=tables.to(DEVICE),
            cu_seqlens_q=cu_q if prefilling else None,
            cu_seqlens_k=cu_k if prefilling else None,
            max_seqlen_q=max(prefilling, default=0),
            max_seqlen_k=max(k_lens[num_decodes:], default=0),
            num_keys=sum(k_lens[num_decodes:]),
            images=self._place(images) if images else None,
        )

    def _place(self, images: dict[int, list[tuple[int, int]]]) -> ImageRows:
        """The images of sequences, from one position to another."""
        rows = [
            torch.arange(length - n, length) + 1
            for n, length in zip(self.q_lens, self.k_lens, strict=True)
        ]
        spans = []
        for i, places in images.items():
            first = self.k_lens[i] - self.q_lens[i]  # position of the first query
            for begin, end in places:
                rows[i][begin - first : end - first] = end
                row = sum(self.q_lens[:i]) + begin - first
                spans.append(Span(row, end - begin, i, begin))
        limits, none = torch.cat(rows).to(DEVICE, torch.int32), torch.empty(0)
        return ImageRows(none, none, tuple(spans), limits)

    def wanted(self) -> torch.Tensor:
        """Attention in float64, one sequence at a time, from the contiguous keys and values."""
        out, row, images = [], 0, self.context.images
        for keys, values, n in zip(self.keys, self.values, self.q_lens, strict=True):
            q = self.q[row : row + n].double()
            own = slice(row, row + n)
            row += n
            G = q.shape[1] // keys.shape[1]
            k, v = (x.double().repeat_interleave(G, 1) for x in (keys, values))
            scale, window, softcap, sinks = self.scoring
            scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            L = len(keys)
            seen = torch.ones(n, L, dtype=torch.bool, device=DEVICE).tril(L - n)
            if images is not None and images.limits is not None:
                seen = torch.arange(L, device=DEVICE) < images.limits[own, None]
            if window:
                seen = seen.triu(L - n - window + 1)
            weights = scores.masked_fill(~seen, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks.double().exp()[:, None, None]
            out.append(torch.einsum("hnl,lhd->nhd", weights / total, v))
        return torch.cat(out)


def run_case(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """Attend. What stores keys and values has a test of its own, and is slow when interpreted."""
    TorchBackend().store_kvcache(case.k, case.v, case.cache, case.context.slot_mapping)
    out = backend.attend(QKV(case.q, case.k, case.v), case.cache, case.context, case.scoring)
    if case.context.images is not None and not backend.attends_in_images:
        attend_in_images(case.q, out, case.cache, case.context, case.scoring)
    return out


CASES = {
    "prefill": {"q_lens": [1, 5, 33, 70], "k_lens": [1, 5, 33, 70]},
    "prefill-cached": {"q_lens": [3, 17, 64], "k_lens": [20, 81, 64]},
    "decode": {"q_lens": [1] * 5, "k_lens": [1, 16, 17, 63, 130], "num_decodes": 5},
    "mixed": {"q_lens": [1, 1, 9, 40], "k_lens": [30, 5, 41, 40], "num_decodes": 2},
    "one-block-256": {"q_lens": [1, 30], "k_lens": [200, 40], "block_size": 256},
    "gqa-1": {"q_lens": [1, 20], "k_lens": [40, 20], "num_decodes": 1, "hq": 2},
    "gqa-8": {"q_lens": [1, 20], "k_lens": [40, 50], "num_decodes": 1, "hq": 8, "hkv": 1},
    "gqa-12": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "hq": 12, "hkv": 1},
    "gqa-40": {"q_lens": [1, 20], "k_lens": [130, 50], "num_decodes": 1, "hq": 40, "hkv": 1},
    "gqa-3": {"q_lens": [1, 20], "k_lens": [40, 50], "num_decodes": 1, "hq": 6},
    "head-64": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "d": 64},
    "head-128": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "d": 128},
    "head-256": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "d": 256},
    "head-80": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "d": 80},
    "window-1": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "window": 1},
    "window-10": {
        "q_lens": [1, 1, 1, 9, 40, 90],
        "k_lens": [5, 130, 64, 41, 40, 150],
        "num_decodes": 3,
        "window": 10,
    },
    "window-70": {
        "q_lens": [1, 1, 9, 40, 90, 130],
        "k_lens": [60, 200, 151, 40, 150, 130],
        "num_decodes": 2,
        "window": 70,
    },
    "softcap": {"q_lens": [1, 20], "k_lens": [70, 50], "num_decodes": 1, "softcap": 1.5},
    # Images at the beginning, between and at the end, next to each other, and longer than a tile;
    # after what is cached, and longer than the window.
    "images": {
        "q_lens": [1, 5, 33, 150],
        "k_lens": [70, 5, 33, 150],
        "num_decodes": 1,
        "images": {1: [(0, 5)], 2: [(3, 20)], 3: [(0, 17), (17, 99), (110, 150)]},
    },
    "images-cached": {
        "q_lens": [17, 64],
        "k_lens": [81, 150],
        "hq": 6,
        "d": 80,
        "images": {0: [(64, 80)], 1: [(90, 145)]},
    },
    "images-window": {
        "q_lens": [1, 90, 130],
        "k_lens": [200, 150, 130],
        "num_decodes": 1,
        "window": 20,
        "images": {1: [(70, 100)], 2: [(5, 60), (61, 130)]},
    },
    "sinks": {
        "q_lens": [1, 1, 9, 40],
        "k_lens": [1, 200, 41, 40],
        "num_decodes": 2,
        "sinks": True,
        "window": 60,
    },
}
