"""Find the texts that are nearest to a query, by their embeddings.

python examples/embeddings.py
python examples/embeddings.py --model DIRECTORY --texts texts.txt --query "how to bake bread"
"""

import argparse
from pathlib import Path

import numpy as np

from nanovllm import LLM, TINY

WORDS = ["apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbor"]
TEXTS = [  # of the kinds that the embedded checkpoint knows
    *(f"reverse: {word} =" for word in WORDS),
    *(f"count from {17 * i}:" for i in range(1, 9)),
    *(f"{100 + 97 * i}+{900 - 61 * i}=" for i in range(8)),
]


def main() -> None:
    """Print the nearest texts, with the cosines of their angles to the query."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--texts", type=Path, help="a file with a text on each line")
    parser.add_argument("--query", action="append", help="what to look for; may be given again")
    parser.add_argument("--count", type=int, default=3, help="texts to print of each query (3)")
    args = parser.parse_args()
    texts = args.texts.read_text("utf-8").splitlines() if args.texts else TEXTS
    texts = [text for text in texts if text.strip()]
    queries = args.query or ["reverse: island =", "count from 200:", "555+444="]

    with LLM(args.model) as llm:
        outputs = llm.embed([*texts, *queries], pooling="mean")  # vectors of length 1
    vectors = np.array([output.outputs.embedding for output in outputs])  # [texts + queries, M]
    vectors -= vectors[: len(texts)].mean(0)  # a part that all texts share says nothing of one
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors[len(texts) :] @ vectors[: len(texts)].T  # [queries, texts]
    for query, row in zip(queries, cosines, strict=True):
        print(query)
        for i in np.argsort(-row)[: args.count]:
            print(f"  {row[i]:.2f}  {texts[i]}")


if __name__ == "__main__":
    main()
