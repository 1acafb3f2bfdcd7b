"""`SamplingParams`: how one request is sampled and when it ends."""

from dataclasses import dataclass

from nanovllm.utils.checks import check_bool, check_float, check_int, plain_integers


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a request.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (greedy decoding),
            and so does anything below 1e-5.
        max_tokens: the most tokens to generate, at least 1.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens` (for benchmarks).

    Raises:
        TypeError: for a value of the wrong type, or an unknown argument.
        ValueError: for a value out of range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0.0)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        plain_integers(self)
