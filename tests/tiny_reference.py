"""The embedded checkpoint: prompts, and their greedy continuations by transformers."""

import functools
import random
from typing import Any

import torch
import train_tiny

from nanovllm import SamplingParams

SEED = 7
MAX_TOKENS = 16
END = [258, 256]  # end-of-sequence tokens
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


def make_prompts() -> list[list[int]]:
    """80 prompts: tasks the model knows, and random bytes of 1 to 768 tokens (3 blocks of 256)."""
    print("seed", SEED)
    rng = random.Random(SEED)
    texts = [
        train_tiny.addition_prompt(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(24)
    ]
    texts += [train_tiny.count_prompt(rng.randint(0, 400)) for _ in range(12)]
    texts += [train_tiny.reverse_prompt(word) for word in ("engine", "paged", "cache", "token")]
    texts += [train_tiny.PRIMES_PROMPT, train_tiny.INTRO_PROMPT]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 255, 256, 257, 511, 512, 513, 768]
    lengths += [rng.randint(1, 300) for _ in range(14)] + [rng.randint(1, 120) for _ in range(8)]
    return [list(text.encode()) for text in texts] + [
        [rng.randrange(256) for _ in range(n)] for n in lengths
    ]


def assert_greedy(
    reference: Any, prompts: list[list[int]], found: list[list[int]], max_tokens: int = MAX_TOKENS
) -> None:
    """Each is the greedy continuation by transformers, up to an end-of-sequence token: a token is
    the likeliest after those before it, so one pass of the model is enough.
    """
    for prompt, output in zip(prompts, found, strict=True):
        assert output == likeliest(reference, (*prompt, *output))[len(prompt) - 1 : -1]
        ends = [token in END for token in output]
        assert not any(ends[:-1])
        assert ends[-1] or len(output) == max_tokens


@functools.cache
def likeliest(reference: Any, ids: tuple[int, ...]) -> list[int]:
    """After each of the tokens."""
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].argmax(-1).tolist()
