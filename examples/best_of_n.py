"""Sample several answers to each question, and keep the best: by agreement, and by likelihood.

python examples/best_of_n.py
"""

import argparse
from collections import Counter

from nanovllm import LLM, TINY, CompletionOutput, SamplingParams


def likelihood(completion: CompletionOutput) -> float:
    """The mean log-probability of a completion's tokens."""
    assert completion.cumulative_logprob is not None
    return completion.cumulative_logprob / len(completion.token_ids)


def main() -> None:
    """Count the right sums of one sample, of the commonest of n, and of the likeliest of n."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--n", type=int, default=16, help="samples of each question (16)")
    parser.add_argument("--temperature", type=float, default=3.0, help="of sampling (3)")
    args = parser.parse_args()
    pairs = [(100 + 4 * i, 900 - 3 * i) for i in range(200)]
    conversations = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    params = [  # each question draws by seeds of its own
        SamplingParams(args.temperature, max_tokens=8, n=args.n, seed=args.n * i, logprobs=0)
        for i in range(len(pairs))
    ]
    with LLM(args.model) as llm:
        outputs = llm.chat(conversations, params)  # the samples share their prompt's KV cache

    right = Counter[str]()
    for (a, b), output in zip(pairs, outputs, strict=True):
        samples, answer = output.outputs, str(a + b)
        [(commonest, _)] = Counter(sample.text for sample in samples).most_common(1)
        right["first sample"] += samples[0].text == answer
        right[f"commonest of {args.n}"] += commonest == answer
        right[f"likeliest of {args.n}"] += max(samples, key=likelihood).text == answer
        right["any of them"] += any(sample.text == answer for sample in samples)
    for way, count in right.items():
        print(f"{way}: {count} of {len(pairs)} sums are right")


if __name__ == "__main__":
    main()
