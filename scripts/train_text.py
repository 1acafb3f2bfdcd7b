"""Train a model of some 100 million parameters, or a mixture, on the text of this machine.

The embedded checkpoint is certain of what it has learnt and knows nothing else, so it says little
of what rounding costs a model of language. There is no text to download: this one learns the Python
sources and the documentation of the standard library and of the installed packages. Files are taken
in the order of their SHA-256, each once; the first of them are held out, and written beside the
checkpoint for `benchmarks/accuracy.py`. Its shape is Qwen3's, with heads of 128; a mixture
(`--model-type`) has experts half as wide as that MLP, of which a token has two.

    python scripts/train_text.py --out DIR --compile --max-minutes 5      # one CUDA GPU
    python scripts/train_text.py --out DIR --model-type gpt_oss --max-minutes 5
    python benchmarks/accuracy.py --model DIR --text DIR/held-out.txt
"""

from __future__ import annotations

import hashlib
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train_tiny import END_OF_TEXT, make_model, save, train, training_parser

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
SIZES = range(200, 500_000)  # of files, in bytes: others are stubs or data
LENGTH = 1024  # tokens of an example, and the longest context
HEAD_DIM = 128
TOKENIZER_BYTES = 2**26  # of text from which the tokenizer is made
PART = 1000  # files encoded at once
EXPERTS = 8  # of a mixture


def machine_roots() -> list[Path]:
    """The standard library and the installed packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def read_texts(roots: Iterable[Path], max_bytes: int) -> list[str]:
    """Up to `max_bytes` of text below these directories, in the order of the files' SHA-256."""
    found: dict[bytes, Path] = {}
    sizes: dict[bytes, int] = {}
    for root in roots:
        for path in root.rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                data = path.read_bytes()
                if len(data) in SIZES:
                    digest = hashlib.sha256(data).digest()
                    found[digest], sizes[digest] = path, len(data)
    texts = []
    for digest in sorted(found):
        max_bytes -= sizes[digest]
        if max_bytes < 0:
            break
        try:
            texts.append(found[digest].read_text("utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def split(texts: list[str], held_out: int) -> tuple[list[str], list[str]]:
    """The first texts, `held_out` characters or more, and the others."""
    count = total = 0
    while total < held_out:
        total += len(texts[count])
        count += 1
    return texts[:count], texts[count:]


def make_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, made from the first texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    first, _ = split(texts, min(TOKENIZER_BYTES, sum(map(len, texts))))
    core.train_from_iterator(first, trainer)
    return core


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """[n] int32, the tokens of all texts, each ended by END_OF_TEXT."""
    import torch

    end, parts = tokenizer.token_to_id(END_OF_TEXT), []
    for begin in range(0, len(texts), PART):
        encoded = tokenizer.encode_batch_fast(texts[begin : begin + PART])
        ids = [token for text in encoded for token in (*text.ids, end)]
        parts.append(torch.tensor(ids, dtype=torch.int32))
    return torch.cat(parts)


def shape_of(args: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of the model: heads of 128, two per KV head; an MLP three times as wide."""
    heads, end = args.hidden_size // HEAD_DIM, tokenizer.token_to_id(END_OF_TEXT)
    inner = 3 * args.hidden_size
    of_mixture = {
        "qwen3": {"intermediate_size": inner},
        "qwen3_moe": {"moe_intermediate_size": inner // 2, "num_experts": EXPERTS},
        "gpt_oss": {"intermediate_size": inner // 2, "num_local_experts": EXPERTS},
    }[args.model_type]
    if args.model_type != "qwen3":
        of_mixture["num_experts_per_tok"] = 2
    return of_mixture | {
        "vocab_size": -(-tokenizer.get_vocab_size() // 128) * 128,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": HEAD_DIM,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.02,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def main() -> None:
    import torch

    about = (__doc__ or "").split("\n")[0]
    parser = training_parser(about, out=Path("text-qwen3"), steps=20_000, batch=32, lr=1e-3)
    parser.add_argument(
        "--roots", type=Path, nargs="+", default=machine_roots(), help="of text (this machine's)"
    )
    parser.add_argument("--megabytes", type=float, default=300, help="of text (300)")
    parser.add_argument("--held-out", type=int, default=250_000, help="characters (250000)")
    parser.add_argument("--vocab-size", type=int, default=16_384, help="tokens (16384)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="multiple of 128 (1024)")
    parser.add_argument("--layers", type=int, default=8, help="(8)")
    types = ("qwen3", "qwen3_moe", "gpt_oss")
    parser.add_argument("--model-type", choices=types, default="qwen3", help="(qwen3)")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    held_out, texts = split(read_texts(args.roots, int(args.megabytes * 1e6)), args.held_out)
    tokenizer = make_tokenizer(texts, args.vocab_size)
    ids = encode(tokenizer, texts).to(args.device)  # [n]
    tests = encode(tokenizer, held_out)[:-1].unfold(0, LENGTH, LENGTH).long()  # [pieces, LENGTH]
    model = make_model(args.seed, shape_of(args, tokenizer), args.model_type).to(args.device)
    print(
        f"{len(texts):,} files of {sum(map(len, texts)):,} characters, {len(ids):,} tokens, after "
        f"{time.monotonic() - began:.0f} s; {model.num_parameters():,} parameters",
        flush=True,
    )
    places = torch.arange(LENGTH, device=args.device)

    def draw() -> list[tuple[torch.Tensor, torch.Tensor]]:
        first = torch.randint(len(ids) - LENGTH, (args.batch, 1), device=args.device)
        rows = ids[first + places].long()
        return [(rows, rows)]

    @torch.no_grad()
    def judge() -> dict[str, float]:
        rows = tests.to(args.device).split(args.batch)
        losses = [model(input_ids=row, labels=row).loss * len(row) for row in rows]
        return {"held-out loss": float(sum(losses) / len(tests))}

    train(model, draw, judge, args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "held-out.txt").write_text("".join(held_out), "utf-8")
    save(model, tokenizer, {"eos_token": END_OF_TEXT}, args.out)
    print("as saved:", judge())


if __name__ == "__main__":
    main()
