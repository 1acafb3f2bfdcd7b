"""Divide prompts among several GPUs, with a whole engine on each (on a CPU: in two processes).

python examples/data_parallel.py --replicas 2
"""

import argparse

from nanovllm import LLM, TINY, SamplingParams


def main() -> None:
    """Answer sums, and tell which replica answered how many."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--replicas", type=int, default=2, help="engines (2)")
    parser.add_argument("--gpus", type=int, default=1, help="of each, that the model is split over")
    args = parser.parse_args()

    pairs = [(100 + 4 * i, 900 - 3 * i) for i in range(200)]
    conversations = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(args.model, data_parallel_size=args.replicas, tensor_parallel_size=args.gpus) as llm:
        outputs = llm.chat(conversations, params)  # in the order of the conversations
        metrics = llm.metrics()

    for number, replica in metrics.get("replicas", {}).items():
        answers, tokens = replica["num_finished"], replica["num_generated_tokens"]
        print(f"replica {number}: {answers} answers of {tokens} tokens")
    texts = [output.outputs[0].text for output in outputs]
    right = sum(str(a + b) in text for (a, b), text in zip(pairs, texts, strict=True))
    print(f"{right} of {len(pairs)} sums are right")


if __name__ == "__main__":
    main()
