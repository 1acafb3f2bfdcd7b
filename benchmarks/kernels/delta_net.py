"""Gated DeltaNet alone: a layer's kernels for decodes and for prompts, of random numbers in bf16.

CUDA-graph replays, median, each with its share of the bandwidth (of the bytes that have to be read
and written), and how far states and outputs are from those of the PyTorch form.

    python benchmarks/kernels/delta_net.py [--heads 16 32] [--head-dim 128] [--bandwidth 3.35]

The last line is JSON.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.kernels.decode_attention import microseconds
from nanovllm.kernels.recurrent.delta_decode import decode
from nanovllm.kernels.recurrent.delta_prompt import chunks_of, prompts
from nanovllm.recurrent import delta_rule
from nanovllm.tensors.delta_net import DeltaNet, DeltaState

TAPS = 4
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = ([8192], [2048] * 4, [512] * 16, [32] * 256, [512], [100])


class Shape(NamedTuple):
    """Numbers of key and of value heads, and their size."""

    Hk: int
    Hv: int
    D: int

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.Hk + self.Hv) * self.D

    def bytes_of(self, num_tokens: int, num_read: int, num_written: int) -> int:
        """Bytes of inputs and outputs of tokens, and of states that are read and written."""
        row = 2 * (self.channels + 2 * self.Hv * self.D + 2 * self.Hv)
        state = 4 * self.Hv * self.D**2 + 2 * (TAPS - 1) * self.channels
        return num_tokens * row + (num_read + num_written) * state

    def layer(self, device: str) -> DeltaNet:
        """Parameters, with decays as of a trained model: of half of a state in 3 to 700 tokens."""
        decay = torch.linspace(-7, -1.5, self.Hv, device=device)
        norm = torch.ones(self.D, device=device)
        conv = torch.randn(self.channels, TAPS, device=device, dtype=torch.bfloat16) / 2
        return DeltaNet(conv, decay, torch.zeros_like(decay), norm, 1e-6, self.Hk)

    def inputs(self, num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of tokens."""
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        mixed = torch.randn(num_tokens, self.channels + self.Hv * self.D, **kind)
        return mixed, torch.randn(num_tokens, 2 * self.Hv, **kind)

    def state(self, num_rows: int, device: str) -> DeltaState:
        """States of random numbers."""
        tail = torch.randn(num_rows, TAPS - 1, self.channels, device=device, dtype=torch.bfloat16)
        return DeltaState(tail, torch.randn(num_rows, self.Hv, self.D, self.D, device=device) / 9)


def ints(numbers: Any, device: str) -> torch.Tensor:
    """Numbers as int32."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def difference(
    out: torch.Tensor, state: DeltaState, wanted: torch.Tensor, other: DeltaState
) -> str:
    """The distances of outputs and states from others, relative to the roots of mean squares."""
    pairs = (out.float(), wanted.float()), (state.memory, other.memory)
    errors = [float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs]
    assert torch.equal(state.tail, other.tail), "the tails differ"
    return f"outputs {errors[0]:.1e}, states {errors[1]:.1e} off"


def measure_decodes(shape: Shape, D: int, device: str) -> tuple[float, int, str]:
    """Microseconds, bytes and the difference, of D sequences."""
    layer, (mixed, ba), state = shape.layer(device), shape.inputs(D, device), shape.state(D, device)
    slots, lens = ints(torch.randperm(D).tolist(), device), ints([9] * D, device)
    other = DeltaState(*(x.clone() for x in state))
    out = decode(mixed, ba, layer, state, slots, lens)
    wanted = delta_rule.decode(mixed, ba, layer, other, slots, lens)
    off = difference(out, state, wanted, other)
    del other
    time = microseconds(partial(decode, mixed, ba, layer, state, slots, lens))
    return time, shape.bytes_of(D, D, D), off


def measure_prompts(shape: Shape, lens: list[int], device: str) -> tuple[float, int, str]:
    """Microseconds, bytes and the difference, of whole prompts."""
    T, P = sum(lens), len(lens)
    layer, (mixed, ba), state = shape.layer(device), shape.inputs(T, device), shape.state(P, device)
    slots, ends = ints(range(P), device), ints([0, *torch.tensor(lens).cumsum(0).tolist()], device)
    other = DeltaState(*(x.clone() for x in state))
    given = mixed, ba, layer, state, slots, ends, ends, chunks_of(ends, T)
    out = prompts(*given)
    wanted = delta_rule.prompts(mixed, ba, layer, other, slots, ends, ends)
    off = difference(out, state, wanted, other)
    del other
    return microseconds(partial(prompts, *given)), shape.bytes_of(T, 0, P), off


def main() -> None:
    """Measure all sizes and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--heads",
        nargs=2,
        type=int,
        default=[16, 32],
        metavar=("HK", "HV"),
        help="key and value heads (16 32)",
    )
    parser.add_argument("--head-dim", type=int, default=128, help="head size (128)")
    parser.add_argument(
        "--bandwidth", type=float, default=3.35, help="TB/s of the memory (3.35, of an H100)"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    torch.manual_seed(0)
    Hk, Hv = args.heads
    shape, results = Shape(Hk, Hv, args.head_dim), {}
    jobs: list[tuple[str, Any]] = [
        *((f"{D} decodes", partial(measure_decodes, shape, D)) for D in DECODES),
        *((f"{len(x)} x {x[0]} tokens", partial(measure_prompts, shape, x)) for x in PROMPTS),
    ]
    for name, job in jobs:
        time, size, off = job("cuda")
        share = size / time / 1e6 / args.bandwidth
        print(f"{name}: {time:.1f} us, {size / 1e6:.1f} MB, {share:.0%} of the bandwidth; {off}")
        results[name] = round(time, 1)
    conditions = {"gpu": torch.cuda.get_device_name(), "shape": shape}
    print(json.dumps({**conditions, "microseconds": results}))


if __name__ == "__main__":
    main()
