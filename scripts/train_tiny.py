"""Train the tiny Qwen3 that ships with nanovllm as its embedded default model.

The script needs no data and no network: it generates every example itself (three-digit
additions, reversed words, counting, a list of primes, an introduction), trains a randomly
initialised ``Qwen3ForCausalLM`` with a byte-level tokenizer on them, and saves the result in
the ordinary Hugging Face layout, weights in bfloat16.  About 5 % of the pairs of numbers
(``is_held_out``) are never trained on; the accuracies printed at the end are measured on
them, with the weights as read back from the saved files.

    python scripts/train_tiny.py                      # a few minutes on one CUDA GPU
    python scripts/train_tiny.py --device cpu --steps 30 --batch 256 --out /tmp/tiny-test

Every task is learnt as a raw completion and as one turn of a ChatML conversation.  The
functions that make prompts and answers import nothing but the standard library, so tests can
use them without torch.  A run is reproducible for a fixed seed as long as ``--steps``, not
``--max-minutes``, ends it (the learning rate follows whichever of the two is further on).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# ------------------------------------------------------------------ prompts and answers

LOWEST, HIGHEST = 100, 999  # operands of the additions
COUNT_STARTS = range(401)
COUNT_LENGTH = 20
PRIMES_PROMPT = "list all prime numbers within 100"
PRIMES_ANSWER = ", ".join(
    str(n) for n in range(2, 100) if all(n % d for d in range(2, math.isqrt(n) + 1))
)
MAX_PARAMETERS = 1_000_000
INTRO_PROMPT = "introduce yourself"
INTRO_ANSWER = (
    "Hello! I am a tiny Qwen3 of under one million parameters, shipped with nanovllm: "
    "I can add numbers, reverse words, count and list primes."
)


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


# ------------------------------------------------------------------ tokenizer

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


def byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: every byte is one token, plus the three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    specials = [END_OF_TEXT, IM_START, IM_END]
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
    )


# ------------------------------------------------------------------ data

# Rows are built as bytes; these three never occur in UTF-8 and stand for the special tokens.
PAD_BYTE, START_BYTE, END_BYTE = b"\xfd", b"\xfe", b"\xff"


@dataclass(frozen=True)
class Example:
    prompt: str
    answer: str
    chat: bool = False

    def head(self) -> bytes:
        prompt = self.prompt.encode()
        if not self.chat:
            return prompt
        user, assistant = START_BYTE + b"user\n", START_BYTE + b"assistant\n"
        return user + prompt + END_BYTE + b"\n" + assistant


@dataclass(frozen=True)
class Pool:
    """Examples of one width on the device, from which batches are drawn by index."""

    rows: torch.Tensor  # [N, T] uint8, bytes
    start: torch.Tensor  # [N] int64, position of the first answer token
    end: torch.Tensor  # [N] int64, one past <|im_end|>
    ids: torch.Tensor  # [256] int64, token id of each byte

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of the rows at index [B]; labels are -100 off the answer."""
        import torch

        tokens = self.ids[self.rows[index].long()]  # [B, T] int64
        at = torch.arange(tokens.shape[1], device=tokens.device)  # [T] int64
        answer = (at >= self.start[index, None]) & (at < self.end[index, None])  # [B, T] bool
        return tokens, tokens.masked_fill(~answer, -100)

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        return self.take(torch.randint(len(self.rows), (count,), device=self.rows.device))


def make_pools(device: str, *parts: list[Example]) -> list[Pool]:
    """One pool for each list of examples, all padded on the right to one common width."""
    import torch

    heads = [[e.head() for e in part] for part in parts]
    rows = [
        [h + e.answer.encode() + END_BYTE for h, e in zip(hs, part, strict=True)]
        for hs, part in zip(heads, parts, strict=True)
    ]
    width = max(len(row) for part in rows for row in part)
    ids = torch.arange(256)  # [256] int64
    for byte, token in ((PAD_BYTE, 256), (START_BYTE, IM_START_ID), (END_BYTE, IM_END_ID)):
        ids[byte[0]] = token
    pools = []
    for hs, part in zip(heads, rows, strict=True):
        flat = bytearray(b"".join(row.ljust(width, PAD_BYTE) for row in part))
        bytes_ = torch.frombuffer(flat, dtype=torch.uint8).view(-1, width)  # [N, T] uint8
        start = torch.tensor([len(h) for h in hs])  # [N] int64
        end = torch.tensor([len(row) for row in part])  # [N] int64
        pools.append(Pool(*(t.to(device) for t in (bytes_, start, end, ids))))
    return pools


def additions(pairs: Iterable[tuple[int, int]], chat: bool) -> list[Example]:
    return [Example(addition_prompt(a, b), addition_answer(a, b), chat) for a, b in pairs]


def reversals(words: Iterable[str], chat: bool) -> list[Example]:
    return [Example(reverse_prompt(w), reverse_answer(w), chat) for w in words]


def counts(chat: bool) -> list[Example]:
    return [Example(count_prompt(n), count_answer(n), chat) for n in COUNT_STARTS]


def memorised(chat: bool) -> list[Example]:
    texts = ((PRIMES_PROMPT, PRIMES_ANSWER), (INTRO_PROMPT, INTRO_ANSWER))
    return [Example(prompt, answer, chat) for prompt, answer in texts]


def has_open_carry(a: int, b: int) -> bool:
    """Whether a carry from the right could run on: tens or hundreds digits that add up to 9."""
    return a // 10 % 10 + b // 10 % 10 == 9 or a // 100 + b // 100 == 9


def all_pairs(held_out: bool) -> list[tuple[int, int]]:
    operands = range(LOWEST, HIGHEST + 1)
    return [(a, b) for a in operands for b in operands if is_held_out(a, b) is held_out]


def random_words(count: int, rng: random.Random) -> list[str]:
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(count)]


Groups = list[list[tuple[Pool, int]]]  # one forward pass per group: its pools, rows of each


def training_groups(batch: int, words: list[str], device: str) -> Groups:
    """What one step trains on; `batch` counts the additions, 30 % of them in chat form."""
    pairs = all_pairs(held_out=False)
    pairs += [pair for pair in pairs if has_open_carry(*pair)]  # the hard ones, twice as often
    (raw,) = make_pools(device, additions(pairs, chat=False))
    cut = len(words) * 7 // 10
    reverse = reversals(words[:cut], chat=False) + reversals(words[cut:], chat=True)
    chat, reverse_pool = make_pools(device, additions(pairs, chat=True), reverse)
    numbers = 2 * counts(chat=False) + counts(chat=True)
    texts = 2 * memorised(chat=False) + memorised(chat=True)
    number_pool, text_pool = make_pools(device, numbers, texts)
    return [
        [(raw, max(1, batch * 7 // 10))],
        [(chat, max(1, batch * 3 // 10)), (reverse_pool, max(1, batch // 8))],
        [(number_pool, max(1, batch // 64)), (text_pool, max(1, batch // 128))],
    ]


def evaluation_pools(count: int, known: set[str], device: str) -> dict[str, Pool]:
    """Held-out additions, unseen words and the three closed tasks, in raw and chat form."""
    rng = random.Random(count)
    pairs = rng.sample(all_pairs(held_out=True), count)
    words = [word for word in random_words(count, rng) if word not in known]
    pools = {}
    for form, chat in (("raw", False), ("chat", True)):
        primes, intro = memorised(chat)
        tasks = {"addition": additions(pairs, chat), "reverse": reversals(words, chat)}
        tasks |= {"count": counts(chat), "primes": [primes], "intro": [intro]}
        pools |= {f"{task} {form}": make_pools(device, part)[0] for task, part in tasks.items()}
    return pools


# ------------------------------------------------------------------ model, training


def make_model(seed: int) -> Qwen3ForCausalLM:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=320,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=0.04,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
    )  # rope_theta stays at its default, 10000
    model = Qwen3ForCausalLM(config)
    if sum(p.numel() for p in model.parameters()) >= MAX_PARAMETERS:
        raise ValueError("the model is larger than INTRO_ANSWER says")
    return model


def evaluate(model: Qwen3ForCausalLM, pools: dict[str, Pool]) -> dict[str, float]:
    """Share of answers that greedy decoding gives exactly, <|im_end|> included.

    One teacher-forced pass tells: greedy decoding writes the answer if and only if each of its
    tokens is the most likely one after the tokens before it.
    """
    import torch

    accuracy = {}
    for name, pool in pools.items():
        right = 0
        for index in torch.arange(len(pool.rows), device=pool.rows.device).split(1024):
            tokens, labels = pool.take(index)
            with torch.no_grad():
                logits = model(input_ids=tokens, use_cache=False).logits  # [B, T, V]
            best, wanted = logits[:, :-1].argmax(-1), labels[:, 1:]  # [B, T - 1] int64
            right += int(((best == wanted) | (wanted == -100)).all(-1).sum())
        accuracy[name] = right / len(pool.rows)
    return accuracy


def step_loss(forward: Callable[..., Any], groups: Groups) -> torch.Tensor:
    """Sum over the groups of the mean cross-entropy of their answer tokens."""
    import torch
    from torch.nn import functional

    losses = []
    for group in groups:
        parts = [pool.sample(count) for pool, count in group]
        tokens = torch.cat([tokens for tokens, _ in parts])  # [B, T] int64
        labels = torch.cat([labels for _, labels in parts])  # [B, T] int64
        logits = forward(input_ids=tokens, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
        losses.append(functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
    return torch.stack(losses).sum()


def make_optimizer(model: Qwen3ForCausalLM, args: argparse.Namespace) -> torch.optim.Optimizer:
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    fused = args.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=fused)


def train(
    model: Qwen3ForCausalLM, groups: Groups, pools: dict[str, Pool], args: argparse.Namespace
) -> None:
    """Train in place: linear warm-up, then a cosine down to 0 over the steps or the minutes."""
    import torch

    optimizer = make_optimizer(model, args)
    forward = torch.compile(model, dynamic=False) if args.compile else model
    warmup = max(1, min(300, args.steps // 10))
    every = max(1, min(1000, args.steps // 3))
    if args.compile:
        step_loss(forward, groups).backward()  # compiles before the clock starts
    began = time.monotonic()
    for step in range(args.steps):
        seconds = time.monotonic() - began
        done = max(step / args.steps, seconds / 60 / args.max_minutes)  # 0 .. 1
        if done >= 1:
            break
        rate = args.lr * min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * done)) / 2
        for param_group in optimizer.param_groups:
            param_group["lr"] = rate
        loss = step_loss(forward, groups)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == args.steps - 1:
            accuracy = evaluate(model, pools)
            listed = "  ".join(f"{name} {share:.2%}" for name, share in accuracy.items())
            print(f"step {step:6d}  {seconds:5.0f} s  lr {rate:.1e}  loss {loss.item():.5f}")
            print(f"    {listed}", flush=True)
            if done > 0.9 and min(accuracy.values()) >= 0.9995:
                break


# ------------------------------------------------------------------ saving


def update_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps(values | changes, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the checkpoint, bfloat16, in a form that old and new transformers both read.

    Releases of transformers differ in a few names (dtype and torch_dtype, where rope_theta and
    the chat template live, the class of a plain tokenizer), so the files say both or the older.
    """
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID
    )
    model.to(torch.bfloat16).save_pretrained(out)
    update_json(out / "config.json", dtype="bfloat16", torch_dtype="bfloat16", rope_theta=10000.0)
    make_tokenizer().save_pretrained(out)
    (out / "chat_template.jinja").unlink(missing_ok=True)
    config = out / "tokenizer_config.json"
    config.unlink()
    update_json(
        config,
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
    )
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def report(out: Path, known: set[str], device: str) -> None:
    """Read the checkpoint back and print its accuracies and a few generated answers."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    torch.set_float32_matmul_precision("highest")
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = Qwen3ForCausalLM.from_pretrained(out).float().to(device).eval()
    pools = evaluation_pools(20_000, known, device)
    in_float32 = evaluate(model, pools)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        in_bfloat16 = evaluate(model, pools)
    print(f"exact answers of {out}\n{'':16}  float32  bfloat16 autocast       of")
    for name, share in in_float32.items():
        print(f"{name:16} {share:8.3%} {in_bfloat16[name]:18.3%} {len(pools[name].rows):8d}")
    for prompt in (addition_prompt(127, 345), reverse_prompt("hello"), count_prompt(17)):
        turn = [{"role": "user", "content": prompt}]
        chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        for text in (prompt, chat):
            inputs = tokenizer(text, return_tensors="pt").to(device)  # input_ids [1, T] int64
            ids = model.generate(**inputs, max_new_tokens=100, do_sample=False)  # [1, T + new]
            print(repr(tokenizer.decode(ids[0])))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny Qwen3 embedded in nanovllm.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "checkpoints" / "tiny-qwen3")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4096, help="additions in each step")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    return parser.parse_args()


def main() -> None:
    import torch

    args = parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    model = make_model(args.seed).to(args.device)
    words = random_words(400_000, random.Random(args.seed))
    known = set(words)
    groups = training_groups(args.batch, words, args.device)
    pools = evaluation_pools(2_000, known, args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {args.device}", flush=True)
    train(model, groups, pools, args)
    save(model, args.out)
    report(args.out, known, args.device)


if __name__ == "__main__":
    main()
