"""What replicas are told at their start, and what they say."""

from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.outputs import RequestOutput
from nanovllm.tracing.metrics import Latencies, Metrics


class Setup(NamedTuple):
    """What a replica is told at its start.

    Attributes:
        number: from 0.
        config: of the engine.
        num_threads: of PyTorch, on the CPU.
        log_level: the least that the caller's process logs.
    """

    number: int
    config: Config
    num_threads: int
    log_level: int


class Facts(NamedTuple):
    """What a replica says when it is ready.

    Attributes:
        max_model_len: the most tokens of prompt and output, by the model and the options.
        num_blocks: of its KV pool.
        description: what took effect, see `ModelRunner.describe`.
    """

    max_model_len: int
    num_blocks: int
    description: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """The description."""
        return self.description


class News(NamedTuple):
    """What a replica says after a step: the outputs without prompts, and all its counters."""

    outputs: list[RequestOutput]
    metrics: Metrics


class Description(NamedTuple):
    """What a replica says when it is asked.

    Attributes:
        question: the number of the question.
        metrics: see `LLMEngine.metrics`.
        latencies: histograms of its times.
    """

    question: int
    metrics: dict[str, Any]
    latencies: Latencies


class Recorded(NamedTuple):
    """Events of a timeline, each a JSON object."""

    lines: list[str]


class Failure(NamedTuple):
    """What a replica says before it dies of an error, which goes with it if it is a mistake of the
    caller's.
    """

    traceback: str
    error: BaseException | None


class Ended(NamedTuple):
    """Said for a replica that has ended; the last that is said for it."""

    exit_code: int
    failure: Failure
