"""Counters and histograms for dashboards, under vLLM's names, in Prometheus' text format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats).

The time to the first token is counted when it comes, by a clock of the server. Other times are
those of outputs, counted when requests end. In `inter_token_latency_seconds` each token but the
first counts with the mean of its request: sum and count are exact. Embeddings are left out of the
values of requests; their tokens are counted.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Bounds of buckets: 1, 2 and 5 of each power of ten.
SECONDS = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5))
NUMBERS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))
HISTOGRAMS: Mapping[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (SECONDS, "Time to the first token."),
    "inter_token_latency_seconds": (SECONDS, "Time between tokens, the mean of each request."),
    "request_time_per_output_token_seconds": (SECONDS, "Time of a token, by requests."),
    "e2e_request_latency_seconds": (SECONDS, "Time of requests."),
    "request_queue_time_seconds": (SECONDS, "Time before requests ran."),
    "request_prefill_time_seconds": (SECONDS, "Time from the first step to the first token."),
    "request_decode_time_seconds": (SECONDS, "Time from the first token to the last."),
    "request_inference_time_seconds": (SECONDS, "Time from the first step to the last token."),
    "request_prompt_tokens": (NUMBERS, "Tokens of prompts."),
    "request_generation_tokens": (NUMBERS, "Generated tokens of requests."),
    "request_params_n": (NUMBERS, "Completions of requests."),
    "request_params_max_tokens": (NUMBERS, "Limits of requests in tokens."),
}
GAUGES = {
    "num_requests_running": ("num_running", "Sequences that run."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait."),
    "kv_cache_usage_perc": ("kvcache_usage", "Share of the KV blocks that is used, 0 to 1."),
}
COUNTERS = {
    "num_preemptions": ("num_preemptions", "Preemptions."),
    "generation_tokens": ("num_sampled_tokens", "Generated tokens."),
    "prompt_tokens": ("num_prompt_tokens", "Prompt tokens of finished requests."),
    "prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens looked for in the prefix cache."),
    "prefix_cache_hits": ("num_cached_tokens", "Prompt tokens found in the prefix cache."),
}


class Distribution:
    """Counts of values up to each bound, and beyond the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class ServerMetrics:
    """The counts and times of a server's requests.

    Args:
        model: name of the model, a label of all values.
        max_model_len: maximum number of tokens of a request; higher limits count as this one.
    """

    def __init__(self, model: str, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'model_name="{escaped}",engine="0"'
        self._ends: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._found = {name: Distribution(bounds) for name, (bounds, _) in HISTOGRAMS.items()}

    def count_first(self, seconds: float) -> None:
        """Count a request that has its first token after this time."""
        self._found["time_to_first_token_seconds"].add(seconds)

    def count(self, output: RequestOutput, params: SamplingParams) -> int:
        """Count the completions that end with an output, and the request if it ends. Returns the
        number of those completions.
        """
        ends = [part.finish_reason for part in output.outputs if part.finish_reason is not None]
        for reason in ends:
            self._ends[reason] += 1
        if output.metrics is not None:
            self._count_request(output, output.metrics, params)
        return len(ends)

    def _count_request(
        self, output: RequestOutput, times: RequestMetrics, params: SamplingParams
    ) -> None:
        num_tokens = times.num_decode_tokens + params.n
        decode = times.total_seconds - times.first_token_seconds
        values = {
            "e2e_request_latency_seconds": times.total_seconds,
            "request_queue_time_seconds": times.queue_seconds,
            "request_prefill_time_seconds": times.first_token_seconds - times.queue_seconds,
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": times.total_seconds - times.queue_seconds,
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": num_tokens,
            "request_params_n": params.n,
        }
        if params.max_tokens is not None:
            values["request_params_max_tokens"] = min(params.max_tokens, self._max_model_len)
        if times.seconds_per_token is not None:
            values["request_time_per_output_token_seconds"] = times.seconds_per_token
            between = self._found["inter_token_latency_seconds"]
            between.add(times.seconds_per_token, times.num_decode_tokens)
        for name, value in values.items():
            self._found[name].add(value)

    def count_aborts(self, count: int) -> None:
        """Count completions whose client has gone."""
        self._ends["abort"] += count

    def page(self, engine: Mapping[str, Any], num_refused: int) -> str:
        """All values, with those of `LLM.metrics`, and the number of requests refused because too
        many waited.
        """
        return "\n".join([*self._lines(engine, num_refused), ""])

    def _lines(self, engine: Mapping[str, Any], num_refused: int) -> Iterator[str]:
        for kind, known in (("gauge", GAUGES), ("counter", COUNTERS)):
            for name, (key, text) in known.items():
                full = f"vllm:{name}{'_total' if kind == 'counter' else ''}"
                yield from _head(full, text, kind)
                yield f"{full}{{{self._labels}}} {engine[key]}"
        yield from _head("vllm:request_success_total", "Completions that have ended.", "counter")
        for reason, count in self._ends.items():
            labels = f'{self._labels},finished_reason="{reason}"'
            yield f"vllm:request_success_total{{{labels}}} {count}"
        refused = "vllm:admission_rejections_total"
        yield from _head(refused, "Requests refused because too many waited.", "counter")
        yield f"{refused}{{{self._labels}}} {num_refused}"
        for name, found in self._found.items():
            full = f"vllm:{name}"
            yield from _head(full, HISTOGRAMS[name][1], "histogram")
            bounds = [*map(str, found.bounds), "+Inf"]
            for bound, count in zip(bounds, accumulate(found.counts), strict=True):
                yield f'{full}_bucket{{{self._labels},le="{bound}"}} {count}'
            yield f"{full}_sum{{{self._labels}}} {found.sum}"
            yield f"{full}_count{{{self._labels}}} {sum(found.counts)}"


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
