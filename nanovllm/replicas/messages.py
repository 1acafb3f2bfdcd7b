"""Messages between the engine's process and its replicas."""

from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.outputs import RequestOutput
from nanovllm.tracing.metrics import Latencies, Metrics
from nanovllm.updates.ledger import Expected


class Setup(NamedTuple):
    """The first message to a replica.

    Attributes:
        number: number of the replica, from 0.
        config: options of the engine.
        num_threads: threads of PyTorch on the CPU.
        log_level: lowest level that the caller's process logs.
    """

    number: int
    config: Config
    num_threads: int
    log_level: int


class Facts(NamedTuple):
    """A replica's message when it is ready.

    Attributes:
        max_model_len: maximum length of prompt and output together, in tokens, by the model and
            the options.
        max_num_seqs: number of sequences that may run, see `KVCachePool`.
        num_blocks: blocks of its KV pool.
        pool_tokens: number of tokens of the longest sequence that the pool holds, alone.
        description: options that took effect, see `ModelRunner.describe`.
        expected: tensors of the model.
    """

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    pool_tokens: int
    description: dict[str, Any]
    expected: Expected

    def describe(self) -> dict[str, Any]:
        """The description."""
        return self.description


class News(NamedTuple):
    """A replica's message after a step: the outputs, without prompts, and all its counters."""

    outputs: list[RequestOutput]
    metrics: Metrics


class Answer(NamedTuple):
    """A replica's answer to a question.

    Attributes:
        question: number of the question.
        value: answer.
        error: mistake in the question; None: none.
    """

    question: int
    value: Any
    error: Exception | None = None


class Description(NamedTuple):
    """A replica, described by itself.

    Attributes:
        metrics: metrics of the replica, see `LLMEngine.metrics`.
        latencies: histograms of its times.
    """

    metrics: dict[str, Any]
    latencies: Latencies


class Recorded(NamedTuple):
    """Events of a timeline, each a JSON object."""

    lines: list[str]


class Failure(NamedTuple):
    """A replica's last message, if it dies of an error: the traceback, and the error itself if it
    is a mistake of the caller's.
    """

    traceback: str
    error: BaseException | None


class Ended(NamedTuple):
    """The last message about a replica: its process has ended. Put in its place by `Replicas`."""

    exit_code: int
    failure: Failure
