"""Train the tiny Qwen3 that ships with nanovllm as its embedded default model.

It needs no data and no network: every example is generated here (three-digit additions, reversed
words, counting, a list of primes, an introduction), each as a raw completion and as one turn of a
ChatML conversation. A ``Qwen3ForCausalLM`` with a byte-level tokenizer learns them and is saved in
the ordinary Hugging Face layout, in bfloat16. About 5 % of the pairs of numbers (``is_held_out``)
are never trained on; the accuracies printed at the end are those of the saved files on them.

    python scripts/train_tiny.py --compile            # a few minutes on one CUDA GPU
    python scripts/train_tiny.py --device cpu --steps 30 --batch 256 --out /tmp/tiny-test

The functions that make prompts and answers work without torch, so that tests can use them.
"""

from __future__ import annotations

import json
import math
import random
import string
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

LOWEST, HIGHEST = 100, 999  # operands of the additions
COUNT_STARTS = range(401)
COUNT_LENGTH = 20
PRIMES_PROMPT = "list all prime numbers within 100"
PRIMES_ANSWER = ", ".join(
    str(n) for n in range(2, 100) if all(n % d for d in range(2, math.isqrt(n) + 1))
)
INTRO_PROMPT = "introduce yourself"
INTRO_ANSWER = (
    "Hello! I am a tiny Qwen3 of under one million parameters, shipped with nanovllm: "
    "I can add numbers, reverse words, count and list primes."
)

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 256, 257, 258  # below 256, a token id is its byte
VOCAB_SIZE = 272  # 259 rounded up to a multiple of 16
MAX_POSITIONS = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Examples are built as bytes; these three never occur in UTF-8 and stand for the special tokens.
PAD, START, END = b"\xfd", b"\xfe", b"\xff"
TO_SPECIAL = END_OF_TEXT_ID - PAD[0]  # from each of them to its token id

Pairs = list[tuple[int, int]]
Example = tuple[bytes, bytes]  # given text; text to be learnt


def is_held_out(a: int, b: int) -> bool:
    """Whether a + b belongs to the test split (about 5 %); the order does not matter."""
    h = ((a + b) * 1_000_003 + a * b) * 0x2C1B3C6D & 0xFFFFFFFF
    h = (h ^ h >> 15) * 0x297A2D39 & 0xFFFFFFFF
    return (h ^ h >> 15) % 20 == 0


def addition_prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def addition_answer(a: int, b: int) -> str:
    return str(a + b)


def reverse_prompt(word: str) -> str:
    return f"reverse: {word} ="


def reverse_answer(word: str) -> str:
    return word[::-1]


def count_prompt(n: int) -> str:
    return f"count from {n}:"


def count_answer(n: int) -> str:
    return " ".join(str(n + i) for i in range(1, COUNT_LENGTH + 1))


def make_example(prompt: str, answer: str, chat: bool) -> Example:
    given = prompt.encode()
    if chat:
        given = START + b"user\n" + given + END + b"\n" + START + b"assistant\n"
    return given, answer.encode() + END


def make_tasks(pairs: Pairs, words: list[str], chat: bool) -> dict[str, list[Example]]:
    texts = {
        "addition": [(addition_prompt(a, b), addition_answer(a, b)) for a, b in pairs],
        "reverse": [(reverse_prompt(word), reverse_answer(word)) for word in words],
        "count": [(count_prompt(n), count_answer(n)) for n in COUNT_STARTS],
        "primes": [(PRIMES_PROMPT, PRIMES_ANSWER)],
        "intro": [(INTRO_PROMPT, INTRO_ANSWER)],
    }
    return {task: [make_example(*text, chat) for text in texts[task]] for task in texts}


class Pool:
    """Examples on the device, padded on the right; batches are drawn from it by index."""

    def __init__(self, examples: list[Example], device: str) -> None:
        import torch

        rows = [given + answer for given, answer in examples]
        width = max(len(row) for row in rows)
        flat = bytearray(b"".join(row.ljust(width, PAD) for row in rows))
        self.rows = torch.frombuffer(flat, dtype=torch.uint8).view(-1, width).to(device)  # [N, T]
        self.start = torch.tensor([len(given) for given, _ in examples], device=device)  # [N] int64
        self.end = torch.tensor([len(row) for row in rows], device=device)  # [N] int64
        self.positions = torch.arange(width, device=device)  # [T] int64

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels [B, T] of the rows at index [B]; labels are -100 off the answer."""
        ids = self.rows[index].long()
        ids += TO_SPECIAL * (ids >= PAD[0])
        from_start = self.positions >= self.start[index, None]  # [B, T] bool
        before_end = self.positions < self.end[index, None]  # [B, T] bool
        return ids, ids.masked_fill(~(from_start & before_end), -100)


def all_pairs(held_out: bool) -> Pairs:
    operands = range(LOWEST, HIGHEST + 1)
    return [(a, b) for a in operands for b in operands if is_held_out(a, b) is held_out]


def random_words(count: int, rng: random.Random) -> list[str]:
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(count)]


Pools = list[tuple[Pool, int]]  # with how many rows a step takes
Tests = dict[str, Pool]


def training_pools(batch: int, words: list[str], device: str) -> Pools:
    """Short, medium and long examples; in a step about `batch` additions, 30 % of them as chat."""
    pairs = all_pairs(held_out=False)
    # The hard ones come twice as often: a carry runs on where tens or hundreds add up to 9.
    pairs += [(a, b) for a, b in pairs if 9 in (a // 10 % 10 + b // 10 % 10, a // 100 + b // 100)]
    cut = len(words) * 7 // 10
    raw, chat = make_tasks(pairs, words[:cut], False), make_tasks(pairs, words[cut:], True)
    medium = chat["addition"] + raw["reverse"] + chat["reverse"]
    long = raw["count"] * 2 + chat["count"]
    long += (raw["primes"] + raw["intro"]) * 200 + (chat["primes"] + chat["intro"]) * 100
    return [
        (Pool(raw["addition"], device), batch * 7 // 10),
        (Pool(medium, device), batch * 17 // 40),
        (Pool(long, device), batch * 3 // 128 + 1),
    ]


def evaluation_pools(count: int, known: set[str], device: str) -> Tests:
    """Held-out additions, unseen words and the three closed tasks, in raw and chat form."""
    rng = random.Random(count)
    pairs = rng.sample(all_pairs(held_out=True), count)
    words = [word for word in random_words(count, rng) if word not in known]
    return {
        f"{task} {form}": Pool(examples, device)
        for form, chat in (("raw", False), ("chat", True))
        for task, examples in make_tasks(pairs, words, chat).items()
    }


def make_model(seed: int, shape: dict[str, Any], model_type: str = "qwen3") -> PreTrainedModel:
    """A model of random weights; `shape`: the values of its config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    same: dict[str, Any] = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "bos_token_id": None}
    if model_type == "gpt_oss":  # whose positions are scaled, unless its configuration says more
        same["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    else:
        same["sliding_window"] = None
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **same, **shape))


def make_tiny(seed: int) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 320,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.04,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }
    model = make_model(seed, shape)
    if model.num_parameters() >= 1_000_000:
        raise ValueError("the model is larger than INTRO_ANSWER says")
    return model


def evaluate(model: PreTrainedModel, tests: Tests) -> dict[str, float]:
    """Share of answers that greedy decoding gives exactly; one teacher-forced pass tells."""
    import torch

    accuracy = {}
    for name, pool in tests.items():
        right = 0
        for index in torch.arange(len(pool.rows), device=pool.rows.device).split(1024):
            ids, labels = pool.take(index)
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits  # [B, T, V]
            best, wanted = logits[:, :-1].argmax(-1), labels[:, 1:]  # [B, T - 1] int64
            right += int(((best == wanted) | (wanted == -100)).all(-1).sum())
        accuracy[name] = right / len(pool.rows)
    return accuracy


def train(
    model: PreTrainedModel,
    draw: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]],
    judge: Callable[[], dict[str, float]],
    args: Namespace,
) -> None:
    """Train in place: linear warm-up, then a cosine down to 0 over the steps or the minutes.

    Args:
        draw: batches of a step, token ids and labels [B, T].
        judge: function that measures the model; its figures are printed now and then.
        args: result of `training_parser`.
    """
    import torch
    from torch.nn.functional import cross_entropy

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    decay = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.98), fused=True)
    forward = torch.compile(model, dynamic=False) if args.compile else model
    for step in range(args.steps):
        if step < 2:
            began = time.monotonic()  # step 0, which compiles, does not count
        seconds = time.monotonic() - began
        done = max(step / args.steps, seconds / 60 / args.max_minutes)  # 0 .. 1
        if done >= 1:
            break
        rate = args.lr * min(1, (step + 1) / 300) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = []
        for ids, labels in draw():
            # In bfloat16 a GPU is quicker, and rounds the matrices as they will be saved.
            with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
                logits = forward(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
            losses.append(cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten()))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 1000 == 0 or step == args.steps - 1:
            each = " ".join(f"{loss.item():.5f}" for loss in losses)
            print(f"step {step:6d}  {seconds:5.0f} s  lr {rate:.1e}  losses {each}")
            print("   ", judge(), flush=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Every byte is one token, plus the three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level tokenizers write each byte as one printable character.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    vocab = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    specials = [END_OF_TEXT, IM_START, IM_END]
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return core


CHAT = {
    "eos_token": IM_END,
    "additional_special_tokens": [IM_START],
    "chat_template": CHAT_TEMPLATE,
}


def save(model: PreTrainedModel, tokenizer: Tokenizer, settings: dict[str, Any], out: Path) -> None:
    """Write the checkpoint in bfloat16; where transformers 4 and 5 differ, for both of them.

    Args:
        settings: settings of the tokenizer, besides the common ones.
    """
    from transformers import GenerationConfig

    pad = tokenizer.token_to_id(END_OF_TEXT)
    stop = [*dict.fromkeys((tokenizer.token_to_id(settings["eos_token"]), pad))]
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    model.bfloat16().save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    both = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": 10000.0}
    write_json(out / "config.json", config | both)
    tokenizer.save(str(out / "tokenizer.json"))
    same = {  # all in one file and by the older names, which every transformers reads
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(out / "tokenizer_config.json", same | settings)
    (out / "model.safetensors").chmod(0o644)  # it is written as 0600


def report(out: Path, known: set[str], device: str) -> None:
    """Read the checkpoint back and print its accuracies."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_float32_matmul_precision("highest")
    model = Qwen3ForCausalLM.from_pretrained(out).float().to(device).eval()
    tests = evaluation_pools(20_000, known, device)
    in_float32 = evaluate(model, tests)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        in_bfloat16 = evaluate(model, tests)
    print(f"exact answers of {out}\n{'':16}  float32  bfloat16 autocast       of")
    for name, share in in_float32.items():
        print(f"{name:16} {share:8.3%} {in_bfloat16[name]:18.3%} {len(tests[name].rows):8d}")


def training_parser(description: str, **defaults: Any) -> ArgumentParser:
    """Parser of the options that all training has."""
    import torch

    parser = ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="directory of the checkpoint")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    parser.add_argument("--steps", type=int, help="most steps (%(default)s)")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="end earlier")
    parser.add_argument("--seed", type=int, default=0, help="of weights and examples (0)")
    parser.add_argument("--batch", type=int, help="examples in each step (%(default)s)")
    parser.add_argument("--lr", type=float, help="highest learning rate (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.set_defaults(**defaults)
    return parser


def main() -> None:
    import torch

    out = Path(__file__).resolve().parent.parent / "nanovllm" / "tiny-qwen3"
    about = "Train the tiny Qwen3 embedded in nanovllm."
    args = training_parser(about, out=out, steps=10_000, batch=4096, lr=2e-3).parse_args()
    torch.set_float32_matmul_precision("high")
    model = make_tiny(args.seed).to(args.device)
    words = random_words(400_000, random.Random(args.seed))
    known = set(words)
    pools = training_pools(args.batch, words, args.device)
    tests = evaluation_pools(2_000, known, args.device)
    print(f"{model.num_parameters():,} parameters on {args.device}", flush=True)

    def draw() -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = ((pool, len(pool.rows), count) for pool, count in pools)
        return [
            pool.take(torch.randint(n, (count,), device=args.device)) for pool, n, count in rows
        ]

    train(model, draw, lambda: evaluate(model, tests), args)
    save(model, byte_tokenizer(), CHAT, args.out)
    report(args.out, known, args.device)


if __name__ == "__main__":
    main()
