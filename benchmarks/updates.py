"""New weights, sleep and wake, and a step of reinforcement learning: how long each takes.

    python benchmarks/updates.py --dummy qwen3-0.6b [--only update ipc sleep rollout] [--repeat 3]

update: all weights from tensors on the engine's device, in this process. ipc: from tensors that
another process shares, the opening of its memory included. sleep: both levels, waking each, the
first token after it, and what an engine that sleeps at level 2 leaves on the card beside what an
empty process has there. rollout: a step of GRPO with a learner of the same shape in bf16
(transformers' model and plain SGD, random weights): 64 prompts, 8 samples each, 256 tokens.

Prints the median and range in milliseconds. The last line is JSON, which --save FILE appends to
FILE.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.cli import bench

NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 64, 8, 256
ROWS = 8  # of the learner at once

SENDER = """
import json, sys, torch
from nanovllm import share_weights

device, shapes = sys.argv[1], json.loads(sys.stdin.readline())
tensors = {
    name: torch.full(shape, 0.01, dtype=torch.bfloat16, device=device)
    for name, shape in shapes.items()
}
with share_weights(tensors) as message:
    print(json.dumps(message), flush=True)
    sys.stdin.readline()
"""


class Clock:
    """Milliseconds of what is done several times.

    Args:
        device: torch.device to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.found: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it, and return what it returns."""
        self._wait()
        start = time.perf_counter()
        value = work()
        self._wait()
        self.found.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return value

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def shapes(llm: LLM) -> dict[str, list[int]]:
    """Shapes of the model's tensors, by name."""
    wanted = llm.model_runner.built.weights.expected().wanted
    return {name: facts.shape for name, facts in wanted.items()}


def measure_update(llm: LLM, clock: Clock, repeat: int) -> None:
    """Tensors of this process."""
    device = llm.model_runner.built.device
    tensors = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16, device=device)
        for name, shape in shapes(llm).items()
    }
    for _ in range(repeat + 1):
        clock("update", lambda: llm.update_weights(tensors))
    clock.found["update, the first"] = [clock.found["update"].pop(0)]


def measure_ipc(llm: LLM, clock: Clock, repeat: int) -> None:
    """Tensors of another process, on the same device."""
    command = [sys.executable, "-c", SENDER, str(llm.model_runner.built.device)]
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **path},
    ) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        print(json.dumps(shapes(llm)), file=sender.stdin, flush=True)
        message = json.loads(sender.stdout.readline())
        for _ in range(repeat):
            clock("update by IPC", lambda: llm.update_weights_ipc(message))
        print(file=sender.stdin, flush=True)


def measure_sleep(llm: LLM, clock: Clock, repeat: int) -> None:
    """Both levels, the second with an update."""
    tensors = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes(llm).items()
    }
    one = SamplingParams(temperature=0, max_tokens=1)
    for level in (1, 2):
        for _ in range(repeat):
            clock(f"sleep({level})", lambda: llm.sleep(level))  # noqa: B023
            clock(f"wake after sleep({level})", llm.wake_up)
            if level == 2:
                llm.update_weights(tensors)
            clock("first token then", lambda: llm.generate([[1] * 9], one, use_tqdm=False))


def left_asleep(llm: LLM, free_before: int) -> int:
    """Bytes that the engine leaves on the card asleep, beside what was in use before it."""
    llm.sleep(level=2)
    left = free_before - torch.cuda.mem_get_info(llm.model_runner.built.device)[0]
    llm.wake_up()
    return left


def measure_rollout(llm: LLM, clock: Clock, repeat: int) -> None:
    """Steps of GRPO, all their parts by the clock."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = llm.model_runner.built.device
    config = AutoConfig.from_pretrained(llm.config.model)
    with torch.device(device):
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(n=NUM_SAMPLES, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)

    def learn(rows: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> None:
        optimizer.zero_grad()
        for begin in range(0, len(rows), ROWS):
            part = slice(begin, begin + ROWS)
            logits = policy(rows[part]).logits[:, -NUM_TOKENS - 1 : -1].float()
            taken = rows[part, -NUM_TOKENS:, None]
            new = logits.gather(2, taken)[..., 0] - logits.logsumexp(-1)
            ratio = (new - old[part]).exp()
            loss = -torch.minimum(
                ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part]
            )
            (loss.mean() * len(loss) / len(rows)).backward()
        optimizer.step()

    for _ in range(repeat):
        prompts = torch.randint(0, config.vocab_size, (NUM_PROMPTS, 128), generator=generator)
        outputs = clock(
            "generate",
            lambda: llm.generate(prompts.tolist(), params, use_tqdm=False),  # noqa: B023
        )
        clock("sleep(2)", lambda: llm.sleep(level=2))
        completions = [completion for output in outputs for completion in output.outputs]
        taken = torch.tensor([completion.token_ids for completion in completions])
        rows = torch.cat([prompts.repeat_interleave(NUM_SAMPLES, 0), taken], 1).to(device)
        old = torch.tensor(
            [
                [place[token].logprob for place, token in zip(c.logprobs, c.token_ids, strict=True)]
                for c in completions
            ],
            device=device,
        )
        advantages = torch.randn(len(rows), 1, generator=generator).to(device)
        clock("learn", lambda: learn(rows, old, advantages))  # noqa: B023
        clock("wake the weights", lambda: llm.wake_up(tags=["weights"]))
        clock("update", lambda: llm.update_weights(policy.state_dict()))
        clock("wake the KV cache", lambda: llm.wake_up(tags=["kv_cache"]))


PARTS = {
    "update": measure_update,
    "ipc": measure_ipc,
    "sleep": measure_sleep,
    "rollout": measure_rollout,
}


def measure(llm: LLM, parts: list[str], repeat: int) -> dict[str, Any]:
    """Medians and all runs, in milliseconds, by part and name."""
    results: dict[str, Any] = {}
    for part in parts:
        clock = Clock(llm.model_runner.built.device)
        PARTS[part](llm, clock, repeat)
        for name, found in clock.found.items():
            low, median, high = min(found), statistics.median(found), max(found)
            print(f"{part:8s} {name:24s} {median:9.1f} ms ({low:.1f}–{high:.1f})", flush=True)
            runs = [round(each, 2) for each in found]
            results[f"{part}: {name}"] = {"median": round(median, 2), "runs": runs, "unit": "ms"}
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    bench.add_options(parser, dummy="qwen3-0.6b")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts (all)"
    )
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    args = parser.parse_args()
    free_before = 0
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context, which stays
        free_before = torch.cuda.mem_get_info()[0]
    with (
        bench.checkpoint(args) as (directory, options),
        LLM(directory, **{**options, "enable_sleep_mode": True}) as llm,
    ):
        results = measure(llm, args.only, args.repeat)
        if free_before and args.only == ["sleep"]:
            left = left_asleep(llm, free_before) / 2**30
            print(f"asleep, {left:.2f} GiB stay on the card beside an empty process")
            results["left asleep"] = {"value": round(left, 3), "unit": "GiB"}
        result = {
            "benchmark": "updates",
            "model": bench.model_name(args),
            "results": results,
            **harness.conditions(llm),
        }
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
