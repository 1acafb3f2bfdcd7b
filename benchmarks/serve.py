"""The cost of HTTP: streaming clients of `nanovllm serve` beside `LLM.generate`.

    python benchmarks/serve.py --dummy qwen3-8b [--clients 1 256] [--repeat 3]

Each client asks for one completion of a prompt of --prompt-tokens random tokens, all at once, and
reads it piece by piece; the clients are a process of their own. Measured are

    first-token    seconds to the first piece of single clients, one after the other
    clients-N      tokens per second of N clients, beside those of `generate` for the same prompts
                   in the same engine
    idle           the same of the most clients, with --idle further connections open that ask
                   nothing, beside those of the clients alone

in turns, every other one in reverse, after one of each that is not counted. With an 8B model on a
GPU it takes three minutes, the engine's start included.

Prints the median and range of each, and shares as the median over the turns. The last line is
JSON, which --save FILE appends to FILE. Models without weights get a tokenizer whose tokens are
short words, so that texts are made as those of real ones are.
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.cli import bench
from nanovllm.serve.app import make_app
from nanovllm.serve.server import Server, bind

CLIENTS = Path(__file__).with_name("http_clients.py")
NUM_FIRST = 20  # single requests whose first token is timed


def add_tokenizer(directory: str, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are the words "w0" to the last, each after a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"Ġw{i}": i for i in range(vocab_size - 1)} | {"<|end|>": vocab_size - 1}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(
        directory
    )


class Listening(Server):
    """A server in a thread, which says when it listens."""

    def __init__(self, llm: AsyncLLM, interval: int) -> None:
        self.listener, self._listens = bind("127.0.0.1", 0), threading.Event()
        app = make_app(llm, ["model"], max_waiting=1 << 20, interval=interval)
        super().__init__(app, self.listener, 1.0, "serving at")
        self._thread = threading.Thread(target=self.listen, daemon=True)
        self._thread.start()
        self._listens.wait()

    async def startup(self, sockets: Any = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._listens.set()

    def end(self) -> None:
        """Listen no longer."""
        self.handle_exit(0, None)
        self._thread.join()


class Bench:
    """Workloads of one engine."""

    def __init__(self, llm: AsyncLLM, args: argparse.Namespace) -> None:
        self._llm, self._args = llm, args
        self._server = Listening(llm, args.stream_interval)
        self._vocab_size = self._call(lambda engine: engine.model_config.vocab_size)

    def _call(self, method: Any) -> Any:
        return asyncio.run(self._llm._call(method))

    def conditions(self) -> dict[str, Any]:
        """The conditions, and the end of the server."""
        found = self._call(harness.conditions)
        self._server.end()
        found["loop"] = "uvloop" if find_spec("uvloop") else "asyncio"
        return found

    def _prompts(self, count: int) -> list[list[int]]:
        rng = random.Random(0)
        length = self._args.prompt_tokens
        return [[rng.randrange(self._vocab_size - 1) for _ in range(length)] for _ in range(count)]

    def generate(self, count: int) -> float:
        """Tokens per second of `LLM.generate`."""
        max_tokens, prompts = self._args.max_tokens, self._prompts(count)
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)] * count

        def run(engine: LLM) -> float:
            engine.reset_prefix_cache()
            tokens, seconds = harness.run_once(engine, prompts, params, progress=False)
            return tokens / seconds

        return self._call(run)

    def serve(
        self, count: int, *, idle: int = 0, max_tokens: int, together: bool = True
    ) -> dict[str, Any]:
        """The findings of so many clients, see `http_clients`."""
        self._call(LLM.reset_prefix_cache)
        body = {"max_tokens": max_tokens, "temperature": 0.6, "ignore_eos": True}
        host, port = self._server.listener.getsockname()
        job = {
            "host": host,
            "port": port,
            "path": "/v1/completions",
            "bodies": [{**body, "prompt": prompt} for prompt in self._prompts(count)],
            "together": together,
            "idle": idle,
        }
        command = [sys.executable, str(CLIENTS)]
        done = subprocess.run(
            command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        if found["tokens"] != [max_tokens] * count:
            raise RuntimeError(f"{found['tokens']} tokens instead of {max_tokens} of each")
        return found

    def rate(self, count: int, idle: int = 0) -> float:
        """Tokens per second of so many clients."""
        found = self.serve(count, idle=idle, max_tokens=self._args.max_tokens)
        return sum(found["tokens"]) / found["seconds"]

    def turns(self, count: int, idle: int = 0) -> dict[str, dict[str, Any]]:
        """Rates of clients, of clients beside idle connections, and of `generate`, in turns."""
        clients, rates = f"clients-{count}", defaultdict(list)
        ways: dict[str, Callable[[], float]] = {
            clients: lambda: self.rate(count),
            "generate": lambda: self.generate(count),
        }
        if idle:
            ways["idle"] = lambda: self.rate(count, idle)
        for turn in range(1 + self._args.repeat):
            for name in ways if turn % 2 else reversed(ways):  # none is always the first
                rate = ways[name]()
                if turn:  # the first is not counted
                    rates[name].append(rate)
        share = compared(f"{count} clients", rates[clients], rates["generate"], "generate")
        results = {clients: share}
        if idle:
            others = "clients alone"
            results["idle"] = compared(f"{idle} idle beside", rates["idle"], rates[clients], others)
        return results

    def first_token(self) -> dict[str, Any]:
        """Seconds to the first piece of a single client."""
        self.serve(1, max_tokens=1, together=False)  # compiles what a lone prompt needs
        times = self.serve(NUM_FIRST, max_tokens=1, together=False)["first"]
        median = statistics.median(times)
        span = f"{min(times) * 1000:.2f}–{max(times) * 1000:.2f}"
        print(f"{'first token':16s} {median * 1000:9.2f} ms ({span})", flush=True)
        return {"median": median, "runs": sorted(times), "unit": "s"}


def compared(name: str, rates: list[float], others: list[float], of: str) -> dict[str, Any]:
    """Rates as a result, with their share of the others': the median over the turns."""
    share = statistics.median(a / b for a, b in zip(rates, others, strict=True))
    median, other = statistics.median(rates), statistics.median(others)
    print(
        f"{name:16s} {median:9.0f} tok/s ({min(rates):.0f}–{max(rates):.0f}), "
        f"{share:.3f} of {of} ({other:.0f})",
        flush=True,
    )
    return {
        "median": round(median, 1),
        "runs": [round(rate, 1) for rate in sorted(rates)],
        "unit": "tok/s",
        "other": round(other, 1),
        "share": round(share, 4),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    bench.add_options(parser)
    parser.add_argument(
        "--clients", nargs="+", type=bench.positive, default=[1, 256], help="at once (1 256)"
    )
    parser.add_argument(
        "--idle", type=int, default=1000, help="connections that ask nothing (1000)"
    )
    parser.add_argument(
        "--prompt-tokens", type=bench.positive, default=128, help="of each client (128)"
    )
    parser.add_argument("--max-tokens", type=bench.positive, default=512, help="of an answer (512)")
    parser.add_argument(
        "--stream-interval", type=bench.positive, default=1, help="of the server (1)"
    )
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with bench.checkpoint(args) as (directory, options):
        if args.dummy is not None:
            add_tokenizer(directory, bench.SHAPES[args.dummy]["vocab_size"])
        llm = AsyncLLM(directory, **options)
    try:
        run = Bench(llm, args)
        results = {"first-token": run.first_token()}
        for count in args.clients:
            is_max = count == max(args.clients)
            results |= run.turns(count, args.idle if is_max else 0)
        conditions = run.conditions()
    finally:
        llm.exit()
    result = {
        "benchmark": "serve",
        "model": bench.model_name(args),
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "stream_interval": args.stream_interval,
        "results": results,
        **conditions,
    }
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
