"""Draw docs/drawings/*.svg for "How one request travels": `python scripts/drawings.py`.

They use the names of the code. The example of page and pictures is one: blocks of four tokens,
steps of at most eight, a sequence A of ten prompt tokens, B of five, and C, which comes two steps
later and begins with A's first eight tokens. Host: blue; device: orange; shared or cached: green.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawing import Drawing

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
A_TOKENS = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
B_TOKENS = [31, 32, 33, 34, 35]
C_TOKENS = [*A_TOKENS[:8], 51, 52, 53, 54, 55]


def chain(
    d: Drawing, x: float, y: float, texts: list[str], kind: str, w: float, h: float, gap: float
) -> None:
    """Boxes from left to right, an arrow between each two."""
    for i, text in enumerate(texts):
        left = x + i * (w + gap)
        d.box(left, y, w, h, text, kind)
        if i:
            d.arrow((left - gap, y + h / 2), (left, y + h / 2))


def journey() -> Drawing:
    """All stations of a request, with the functions that it meets there."""
    d = Drawing(760, 394)
    d.head(16, 24, "In: once for each request")
    texts = ["`LLM.generate`\na prompt", "`Intake.check_all`\nrefused, or complete"]
    texts += ["`Request`\nof a `Sequence` or more"]
    chain(d, 16, 36, [*texts, "`Scheduler.waiting`\na queue"], "a", 164, 46, 24)
    d.head(116, 122, "The loop: `EngineCore.step`, until no request is left")
    texts = ["`Scheduler.schedule`\nwho, how many tokens", "`plan_step`\nwhat has changed"]
    texts += ["`ModelRunner.launch`\non every rank", "`Scheduler.postprocess`\na token more each"]
    chain(d, 16, 134, texts, "a", 164, 46, 24)
    d.arrow((662, 82), (662, 104), (98, 104), (98, 134))
    d.arrow((662, 180), (662, 192), (98, 192), (98, 180))
    d.head(16, 226, "On the device: one CUDA graph, but for large steps")
    texts = ["`fill_in`\ntoken ids", "`embed_tokens`", "`Qwen3DecoderLayer`\n28 of them"]
    chain(d, 16, 238, [*texts, "`lm_head`\nlogits", "`Sampler`"], "b", 132, 44, 17)
    d.arrow((474, 180), (474, 208), (6, 208), (6, 260), (16, 260))
    d.arrow((678, 282), (678, 302), (82, 302), (82, 282))
    d.note(380, 297, "`last_tokens`, which the next step reads", "middle")
    d.arrow((744, 260), (752, 260), (752, 157), (744, 157))
    d.head(16, 332, "Out: when a request ends, or after each step of a stream")
    texts = ["`stopping.ends`\nwhy it ended", "`Detokenizer.append`\ntext, stop strings"]
    chain(d, 16, 344, texts, "a", 164, 36, 24)
    chain(d, 392, 344, ["`Request.output`", "`RequestOutput`"], "a", 164, 36, 24)
    d.arrow((368, 362), (392, 362))
    return d


def tokens() -> Drawing:
    """A sequence at four moments: what is computed, and what is not."""
    d = Drawing(760, 238)
    rows: list[tuple[str, list[Any], str, str]] = [
        ("it has arrived", A_TOKENS, "..........", "10 uncomputed: a prefill, at most 8 of it fit"),
        ("after a chunk of 8", A_TOKENS, "aaaaaaaa..", "2 uncomputed: the rest of the prefill"),
        ("after the prompt", [*A_TOKENS, "?"], "aaaaaaaaaab", "1 uncomputed: a decode"),
        ("one step later", [*A_TOKENS, 100, "?"], "aaaaaaaaaaab", "1 uncomputed: a decode"),
    ]
    for i, (when, texts, kinds, then) in enumerate(rows):
        y = 34 + i * 46
        d.text(16, y + 17, when)
        d.cells(140, y, texts, kinds)
        d.note(474, y + 17, then)
    d.brace(140, 400, 30, "prompt tokens of A", up=True)
    d.cells(140, 212, [""], "a", 18, 16)
    d.note(166, 225, "computed: its keys and values are in the cache")
    d.cells(440, 212, ["?"], "b", 18, 16)
    d.note(466, 225, "PENDING: sampled, and not read back yet")
    return d


def paged() -> Drawing:
    """Block tables, and the pool that they point into."""
    d = Drawing(760, 270)
    d.head(16, 24, "What a sequence knows")
    for name, y, kinds, blocks in (
        ("A", 44, "aaaaaaaaaa", [0, 1, 2]),
        ("B", 150, "bbbbb", [3, 4]),
    ):
        texts = A_TOKENS if name == "A" else B_TOKENS
        d.text(16, y + 17, name, style="bold")
        for i in range(0, len(texts), 4):
            part = texts[i : i + 4]
            d.cells(34 + i * 28, y, part, kinds[:1], 26)
        d.text(34, y + 56, "`block_table`")
        d.cells(130, y + 40, blocks, "g", 26)
    d.head(420, 24, "The pool, of N blocks")
    owners: list[list[Any]] = [A_TOKENS[:4], A_TOKENS[4:8], [*A_TOKENS[8:], "", ""], B_TOKENS[:4]]
    owners += [[B_TOKENS[4], "", "", ""], [""] * 4]
    for i, held in enumerate(owners):
        y = 40 + i * 36
        kind = "aaabbg"[i]
        d.text(420, y + 17, f"block {i}")
        d.cells(480, y, held, "".join("g" if text == "" else kind for text in held), 34)
        d.note(626, y + 17, f"slots {4 * i} to {4 * i + 3}")
    d.arrow((208, 96), (300, 96), (300, 124), (412, 124))
    d.note(216, 90, "`block_table[2]` is 2")
    d.note(16, 242, "A's token at position 9:", size=12)
    d.text(16, 261, "`slot = block_table[9 // 4] * 4 + 9 % 4 = 2 * 4 + 1 = 9`")
    return d


def prefix() -> Drawing:
    """A chain of hashes, a sequence that joins it, and what remains when it leaves."""
    d = Drawing(760, 288)
    d.head(16, 24, "Published blocks of A")
    for i, texts in enumerate((A_TOKENS[:4], A_TOKENS[4:8])):
        x = 16 + i * 250
        d.cells(x, 36, texts, "c", 34)
        d.text(x, 80, f"`hash = xxh64({'hash of block 0, ' if i else ''}tokens)`", size=10.5)
        d.text(x, 98, f"`chain_id {i + 1}, parent_chain_id {i}`", size=10.5)
        d.text(x, 116, "`ref_count 2`", size=10.5)
    d.arrow((156, 48), (262, 48))
    d.cells(516, 36, [19, 20, 100, ""], "aaag", 34)
    d.note(516, 80, "not full yet: nobody finds it")
    d.arrow((406, 48), (512, 48))
    d.head(16, 156, "C arrives")
    d.cells(16, 168, C_TOKENS[:4], "c", 34)
    d.cells(266, 168, C_TOKENS[4:8], "c", 34)
    d.cells(516, 168, C_TOKENS[8:12], ".", 34)
    d.cells(660, 168, C_TOKENS[12:], ".", 34)
    for x in (112, 362):
        d.arrow((x, 168), (x, 122), dashed=True)
    d.note(122, 140, "`find_prefix`: equal hash,")
    d.note(122, 154, "equal tokens, right parent")
    d.text(16, 212, "`block_table = [0, 1, 5, 6]`")
    d.note(266, 212, "`num_computed_tokens = 8` at once: five tokens are left to compute")
    d.head(16, 244, "All have left: ref_count 0")
    d.cells(230, 232, ["0", "1", "2"], "c", 34, 20)
    d.note(344, 246, "stay in `cached_block_ids`, and are found again,")
    d.note(344, 260, "until `_take_free_block` has no block without content left:")
    d.note(344, 274, "then the oldest goes, the tail of a chain before its head")
    return d


def steps() -> Drawing:
    """What is computed in six steps, with prompts beside decodes and before them."""
    d = Drawing(760, 300)
    mixed = [["A 8"], ["A 2", "B 5"], ["A", "B", "C 5"], ["C", "A", "B"], ["C", "A", "B"]]
    first = [["A 8"], ["A 2", "B 5"], ["C 5"], ["C", "A", "B"], ["C", "A", "B"]]
    for top, rows, title in (
        (20, mixed, "As it is: what runs decodes in every step, prompts take what is left"),
        (168, first, "mixed_steps=False, as nano-vLLM: A and B wait while C's prompt is computed"),
    ):
        d.head(16, top + 4, title)
        for i, row in enumerate(rows):
            x, used = 60 + i * 138, 0
            d.note(x + 56, top + 122, f"step {i + 1}", "middle")
            d.box(x, top + 18, 112, 88, dashed=True)
            for item in row:
                name, _, size = item.partition(" ")
                count = int(size or 1)
                kind = "a" if size else "b"
                text = f"{name}: {count} prompt tokens" if size else f"{name}: 1"
                d.box(x, top + 18 + used * 11, 112, count * 11, text, kind, 9.5)
                used += count
        d.note(52, top + 26, "0", "end")
        d.note(52, top + 106, "8", "end")
    d.text(38, 90, "tokens", "end", "quiet", 10)
    return d


def batch() -> Drawing:
    """The third step as flat arrays."""
    d = Drawing(760, 310)
    d.head(16, 24, "The third step: A and B decode, C computes five tokens behind eight cached")
    kinds = "bbaaaaa"
    rows: list[tuple[str, list[object], str]] = [
        ("`input_ids`", [-1, -1, *C_TOKENS[8:]], "-1: the device has it, in `last_tokens`"),
        ("`positions`", [10, 5, 8, 9, 10, 11, 12], "for RoPE"),
        ("`slot_mapping`", [10, 17, 20, 21, 22, 23, 24], "where each one's KV is stored"),
    ]
    for i, (name, texts, why) in enumerate(rows):
        y = 56 + i * 32
        d.text(16, y + 17, name)
        d.cells(130, y, texts, kinds, 40)
        d.note(424, y + 17, why)
    for x, text in ((150, "A"), (190, "B"), (310, "C")):
        d.text(x, 49, text, "middle", "bold")
    d.note(16, 49, "rows [T]")
    d.note(16, 176, "sequences [B]")
    d.text(16, 199, "`context_lens`")
    d.cells(130, 182, [11, 6, 13], "bba", 40)
    d.note(424, 199, "tokens that each may see")
    d.text(16, 231, "`block_tables`")
    d.cells(130, 214, ["0 1 2", "3 4", "0 1 5 6"], "bba", 64)
    d.note(424, 231, "A and C share blocks 0 and 1")
    d.text(16, 263, "`cu_seqlens_q`")
    d.cells(130, 246, [0, 5], "a", 40)
    d.text(226, 263, "`cu_seqlens_k`")
    d.cells(330, 246, [0, 13], "a", 40)
    d.note(424, 263, "of prefills: where rows, and keys, begin")
    d.text(16, 295, "`sample_rows`")
    d.cells(130, 278, [0, 1, 6], "g", 40)
    d.note(424, 295, "the last row of each: their next tokens are sampled")
    return d


def layer() -> Drawing:
    """The kernels of a decoder layer, and the two streams between them."""
    d = Drawing(760, 214)
    names = ["RMSNorm", "qkv_proj", "Attention", "o_proj", "gate_up_proj", "down_proj"]
    add, qkv, attend, out, gate, down = (f"`{name}`\nproduct" for name in names)
    add = add.replace("product", "add + norm")
    middle = [qkv, "norm, rotate,\nstore KV", attend.replace("product", "attend")]
    chain(d, 60, 30, [add, *middle], "b", 128, 46, 40)
    chain(d, 60, 116, [out, add, gate, "activation", down], "b", 112, 46, 24)
    d.arrow((692, 53), (736, 53), (736, 96), (30, 96), (30, 139), (60, 139))
    d.arrow((20, 53), (60, 53))
    d.note(16, 44, "hidden")
    d.arrow((716, 139), (748, 139))
    d.box(360, 4, 128, 18, "`KVCache`, paged", "c", 10)
    d.arrow((460, 30), (460, 22))
    d.arrow((624, 30), (624, 13), (488, 13))
    d.line((124, 76), (124, 86), (252, 86), (252, 116))
    d.note(262, 90, "the residual stream: read and written by the norms only")
    d.line((252, 162), (252, 182), (748, 182))
    d.note(262, 196, "to the next layer's norm, which adds what `down_proj` gives")
    return d


def decode() -> Drawing:
    """Attention of single tokens: programs, tiles, and how the parts are combined."""
    d = Drawing(760, 300)
    d.head(16, 24, "One program for each (KV head, sequence, split); here of one sequence")
    for split in range(4):
        x = 16 + split * 146
        d.text(x, 52, f"split {split}", style="bold")
        d.cells(x, 60, ["64", "64", "64"], "c", 44, 26)
        d.arrow((x + 66, 86), (x + 66, 112))
        d.box(x, 112, 132, 62, "`s = q k * scale`\n`m, l, acc` go on", "b", 11)
        d.arrow((x + 66, 174), (x + 66, 200))
        d.box(x, 200, 132, 26, "`part_acc, part_lse`", "b", 10.5)
        d.line((x + 66, 226), (x + 66, 240))
    d.note(604, 70, "tiles of 64 keys, found")
    d.note(604, 84, "through the block table")
    d.note(604, 130, "G queries share a KV")
    d.note(604, 144, "head: one program reads")
    d.note(604, 158, "its keys for all of them")
    d.line((82, 240), (520, 240))
    d.arrow((307, 240), (307, 254))
    d.box(180, 254, 254, 34, "the last one: `combine`, weights `2^lse`", "b")
    d.arrow((434, 271), (484, 271))
    d.text(492, 275, "`out [B, Hq, D]`")
    return d


def graphs() -> Drawing:
    """A batch of 21 in the graph for 32."""
    d = Drawing(760, 250)
    d.head(16, 24, "21 sequences decode: the next bucket is 32")
    d.cells(16, 36, [1, 2, 4, 8, 16], "g", 40)
    d.cells(216, 36, [32], "b", 40)
    d.cells(256, 36, [48, 64, "...", 512], "g", 40)
    d.note(430, 53, "`bucket_sizes(max_num_seqs)`: a graph for each")
    d.text(16, 96, "twin 0, pinned")
    d.text(16, 132, "twin 1, pinned")
    for y, kind in ((80, "a"), (116, "g")):
        d.box(130, y, 170, 24, "21 rows", kind)
        d.box(300, y, 90, 24, "padding", "g")
    d.note(400, 96, "the host fills one while the other")
    d.note(400, 110, "may still be on its way")
    d.arrow((260, 140), (260, 160))
    d.note(270, 154, "one copy")
    d.text(16, 177, "static, device")
    d.box(130, 161, 170, 24, "21 rows", "b")
    d.box(300, 161, 90, 24, "padding", "g")
    d.arrow((390, 173), (430, 173))
    d.box(430, 156, 150, 34, "`graph.replay()`", "b")
    d.arrow((580, 173), (612, 173))
    d.box(612, 156, 132, 34, "`Computed`\nthe first 21 rows", "b", 11)
    d.note(130, 210, "padding: `slot_mapping` -1 stores nothing, `context_lens` 0 reads nothing,")
    d.note(130, 226, "and its token goes to the row behind the last of `last_tokens`")
    return d


def sampling() -> Drawing:
    """A token in two draws."""
    d = Drawing(760, 290)
    d.head(16, 24, "A row of logits, 151,936 columns, in spans of 4096")
    d.cells(16, 36, ["span 0", "span 1", "span 2", "...", "span 37"], "gbggg", 140, 26)
    for i in range(5):
        d.arrow((86 + i * 140, 62), (86 + i * 140, 84))
    d.text(16, 100, "`log w`")
    d.cells(16, 108, ["3.1", "5.4", "4.9", "...", "-2.0"], "g", 140, 24)
    d.text(16, 150, "`+ G`, one noise for each span")
    d.cells(16, 158, ["0.2", "1.1", "0.9", "...", "2.4"], "g", 140, 24)
    d.note(80, 100, "of the sum of exponentials: `_weigh_spans_kernel` reads the logits, once")
    d.arrow((226, 182), (226, 204))
    d.note(238, 197, "the largest sum, 6.5: span 1 is drawn, in proportion to its weight")
    d.cells(16, 206, ["..."], "b", 40, 24)
    d.cells(56, 206, ["logit + G", "logit + G", "logit + G", "logit + G"], "b", 90, 24)
    d.cells(416, 206, ["..."], "b", 40, 24)
    d.note(468, 222, "4096 noises, of one span and not of 38")
    d.arrow((281, 230), (281, 250))
    d.text(293, 252, "the largest of these is the token", size=12)
    d.note(
        16, 278, "the noise is a function of the request's key, the position and the column alone"
    )
    return d


def overlap() -> Drawing:
    """Host and device over time, without and with a step of lookahead."""
    d = Drawing(760, 282)
    d.head(16, 24, "overlap=False: the device waits for the host")
    d.text(16, 52, "host")
    d.text(16, 86, "device")
    for i in range(3):
        x = 80 + i * 220
        d.box(x, 36, 76, 26, f"plan {i + 1}", "a")
        d.box(x + 76, 70, 106, 26, f"step {i + 1}", "b")
        d.box(x + 182, 36, 38, 26, f"book {i + 1}", "a", 9.5)
        d.arrow((x + 76, 62), (x + 76, 70))
        d.arrow((x + 182, 70), (x + 182, 62))
    d.head(16, 140, "overlap=True: step n + 1 is launched before step n's tokens are read")
    d.text(16, 168, "host")
    d.text(16, 202, "device")
    d.box(80, 152, 76, 26, "plan 1", "a")
    for i in range(5):
        x = 156 + i * 112
        d.box(x, 186, 112, 26, f"step {i + 1}", "b")
        if i:
            d.box(x, 152, 36, 26, f"book {i}", "a", 9)
        if i < 4:
            d.box(x + (36 if i else 0), 152, 64, 26, f"plan {i + 2}", "a")
    d.arrow((156, 178), (156, 186))
    d.note(
        80, 236, "what step n + 1 needs is known: which sequences, positions, slots. Tokens stay in"
    )
    d.note(
        80,
        252,
        "`last_tokens`; on the host `PENDING` stands for them. That a token ends its text is",
    )
    d.note(80, 268, "seen one step late, and the superfluous token is dropped.")
    return d


def tensor_parallel() -> Drawing:
    """A layer on two ranks."""
    d = Drawing(760, 268)
    for rank, y in ((0, 34), (1, 146)):
        d.text(16, y + 26, f"rank {rank}", style="bold")
        d.box(80, y, 84, 44, "`norm(x)`\nwhole", "b", 11)
        d.box(184, y, 98, 44, "`qkv_proj`\nits heads", "b", 11)
        d.box(302, y, 98, 44, "attention\nits heads", "b", 11)
        d.box(302, y + 50, 98, 20, "its KV cache", "c", 10)
        d.box(420, y, 98, 44, "`o_proj`\na partial sum", "b", 11)
        d.box(588, y, 120, 44, "`norm(x + sum)`\nwhole again", "b", 11)
        for x in (164, 282, 400):
            d.arrow((x, y + 22), (x + 20, y + 22))
        d.arrow((518, y + 22), (588, y + 22))
    d.arrow((540, 56), (540, 158), (588, 158))
    d.arrow((556, 168), (556, 66), (588, 66))
    d.note(580, 110, "each pushes its rows into the")
    d.note(580, 124, "other's memory and adds up,")
    d.note(580, 138, "inside of the norm's kernel")
    d.note(80, 22, "the same weights' halves: columns of the first product, rows of the second")
    d.text(80, 240, "rank 0: `plan_step` -> `Channel` (shared memory) -> rank 1")
    d.note(
        80, 256, "a `StepPlan` travels, never a sequence: each rank has a `SlotTable` of its own"
    )
    return d


def data_parallel() -> Drawing:
    """Whole engines behind one."""
    d = Drawing(760, 244)
    d.box(16, 20, 330, 196, dashed=True)
    d.text(28, 40, "the caller's process", style="bold")
    chain(d, 28, 56, ["`Intake`\nchecks", "`Dispatcher`\nwho gets what"], "a", 140, 46, 24)
    d.note(28, 128, "the longest expected work first;")
    d.note(28, 143, "prompts that begin alike to one replica;")
    d.note(28, 158, "an eighth more than it can run, never all")
    d.box(192, 172, 140, 34, "`ReplicatedCore`\nbooks news", "a", 11)
    for i in range(3):
        y = 20 + i * 68
        d.box(470, y, 274, 58)
        d.text(484, y + 20, f"replica {i}: a process with its GPU")
        d.box(484, y + 29, 246, 22, "`LLMEngine`: schedule, launch, book", "b", 10.5)
        d.arrow((346, 70 + i * 14), (408, 70 + i * 14), (408, y + 24), (470, y + 24))
        bend, end = 396 - i * 8, 182 + i * 8
        d.arrow((470, y + 46), (bend, y + 46), (bend, end), (332, end), dashed=True)
    d.note(354, 58, "requests")
    d.note(354, 232, "outputs, when some have ended; streams: after each step")
    return d


DRAWINGS: list[Callable[[], Drawing]] = [
    *(journey, tokens, paged, prefix, steps, batch, layer, decode, graphs, sampling, overlap),
    *(tensor_parallel, data_parallel),
]


def draw_all() -> dict[str, str]:
    """The files, by their names."""
    return {f"{draw.__name__.replace('_', '-')}.svg": draw().svg() for draw in DRAWINGS}


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, svg in draw_all().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
