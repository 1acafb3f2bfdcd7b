"""Reports: the figures of a trace, the bottlenecks of the run, and the page in a browser."""

import builtins
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from traces import CPU, H200, MadeTrace, browse, chromium, write_trace

from checkpoints import PARAMS, PROMPTS, SMALL, greedy, rare
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import limits
from nanovllm.cli.main import main
from nanovllm.report import findings
from nanovllm.report.bins import Bins
from nanovllm.report.charts import charts
from nanovllm.report.findings import find
from nanovllm.report.reading import read_trace
from nanovllm.report.summary import Summary, model_config
from nanovllm.report.words import key_figures


def summary_of(path: Path, *made: MadeTrace, **options: Any) -> Summary:
    return Summary(read_trace(str(write_trace(path, *made))), **options)


def busy(facts: dict[str, Any] = H200, steps: int = 100, **options: Any) -> MadeTrace:
    """A run that nothing holds back: 256 decodes, the GPU computes."""
    made = MadeTrace(facts)
    for i in range(steps):
        made.step(0.004, **{"decode": 256, **options})
        if i % 10 == 9:
            made.sequence(cached=100, seconds=0.03)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_figures_are_those_of_metrics(overlap: bool, checkpoint: Path, path: Path) -> None:
    with LLM(checkpoint, overlap=overlap, trace=str(path), **SMALL) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=4, seed=0), use_tqdm=False)
        found = llm.metrics()
    summary = Summary(read_trace(str(path)))
    trace = summary.trace
    assert (trace.has_ended, trace.is_full, len(trace.engines)) == (True, False, 1)
    for column, name in (
        ("prefill_tokens", "num_prefill_tokens"),
        ("sampled_tokens", "num_sampled_tokens"),
        ("preempted", "num_preemptions"),
    ):
        assert trace.total(column) == found[name]
    assert trace.total("own") == pytest.approx(found["step_seconds"], rel=1e-6)
    assert summary.num_requests("stop", "length") == found["num_finished"]
    assert summary.hit_rate == pytest.approx(found["prefix_cache_hit_rate"])
    assert summary.busy_seconds - found["step_seconds"] >= 0
    assert summary.busy_seconds <= trace.seconds * 1.001
    assert trace.engines[0].num_blocks == found["num_kvcache_blocks"]
    assert summary.gpu_share is None and summary.roofline_share is None
    one = [s for s in trace.sequences if s["completion"] == 0]
    longest = max(seq["total_us"] for seq in one) / 1e6
    assert longest <= found["total_seconds"]["max"] + 1e-6


def test_bins_lose_nothing(path: Path) -> None:
    late = replace_pid(busy(steps=1000, prefill=3), 1)
    summary = summary_of(path, busy(steps=300, preempted=1), late)
    bins = Bins(summary.trace)
    assert len(bins.times) == 240
    for column in ("sampled_tokens", "preempted", "seconds"):
        total = bins.sums(bins.column(column)).sum()
        assert total == pytest.approx(summary.trace.total(column))
    assert bins.rates("sampled_tokens")[20:60] == pytest.approx(2 * 256 / 0.004, rel=0.01)
    assert bins.levels("running")[-50:] == pytest.approx(257)
    assert bins.shares(bins.column("gpu")) == pytest.approx(0.97)


def replace_pid(made: MadeTrace, pid: int) -> MadeTrace:
    made.lines = [line.replace('"pid":0', f'"pid":{pid}') for line in made.lines]
    made.pid = pid
    return made


def test_time_without_requests_counts_for_nothing(path: Path) -> None:
    """Time between two steps of a synchronous engine is the host's while requests are open."""
    made = MadeTrace().step(1.0, decode=4, gpu=1.0)
    made.now += 1.0  # the caller does something else
    made.step(1.0, decode=4, gpu=1.0).sequence(seconds=3.0)
    made.now += 5.0  # nobody asks for anything
    made.step(1.0, decode=4, gpu=1.0).sequence(seconds=1.0)
    summary = summary_of(path, made)
    assert summary.busy_seconds == pytest.approx(4.0)
    assert summary.trace.total("own") == pytest.approx(3.0)
    assert summary.gpu_share == pytest.approx(3 / 4)
    assert findings.host_shares(summary)["between"] == pytest.approx(1 / 4, abs=0.01)


def test_a_step_that_was_not_timed_is_an_average_one(path: Path) -> None:
    made = MadeTrace().step(0.004, decode=9, gpu=None).step(0.002, decode=9, gpu=0.5)
    made.step(0.006, decode=9, gpu=0.5).sequence()
    assert summary_of(path, made).gpu_share == pytest.approx(0.5)


def test_a_request_is_finished_when_all_its_completions_are(path: Path) -> None:
    ends = [(7, "stop"), (7, "aborted"), (8, "length")]
    summary = summary_of(path, MadeTrace().step(1.0, decode=3).sequence().sequence().sequence())
    for each, (request, reason) in zip(summary.trace.sequences, ends, strict=True):
        each.update(request=request, finish_reason=reason)
    assert (summary.num_requests("stop", "length"), summary.num_requests("aborted")) == (1, 0)


def test_times_of_requests(path: Path) -> None:
    """A first token comes after a fifth of the time; the others share the rest."""
    made = MadeTrace().step(2.0, decode=1).sequence(generated=5, seconds=2.0)
    summary = summary_of(path, made.sequence(generated=1, seconds=1.0))
    assert summary.times("queue_us") == pytest.approx([0.2, 0.1])
    assert summary.times("first_token_us") == pytest.approx([0.4, 0.2])
    assert summary.times("token_us") == pytest.approx([1.6 / 4])
    assert summary.times("total_us") == pytest.approx([2.0, 1.0])


# -- the roofline ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1.25, 1, 2, 1), (2, 0.53, 2, 2)])
def test_least_time_of_steps_is_that_of_the_workload(
    sizes: tuple[float, float, float, float], path: Path
) -> None:
    """For sequences that all start at once, what `limits.work` has for the whole of it."""
    config = model_config(H200["config"])
    prompts, outputs, hardware = [100, 300, 250], [4, 4, 4], limits.Hardware(4.3e12, 790e12)
    itemsizes = limits.Itemsizes(*sizes)
    work = limits.work(config, itemsizes, prompts, outputs)
    steps = limits.Steps(
        np.array([650, 3, 3, 3]),
        np.array([3, 3, 3, 3]),
        np.array([3, 3, 3, 3]),
        {0: np.array([650, 653, 656, 659])},
        {0: np.array([sum(n * n / 2 for n in prompts), 653, 656, 659])},
    )
    least = limits.least_step_seconds(config, itemsizes, steps, hardware)
    prefill, decode = work.seconds(hardware)
    assert least[1:].sum() == pytest.approx(decode)
    assert least[0] == pytest.approx(prefill)


def test_share_of_the_roofline_is_that_of_limits_that_are_known(path: Path) -> None:
    made = busy(context=600)
    share = summary_of(path, made).roofline_share
    weights = 2 * (596_049_920 - 28 * (2 * 1024 + 2 * 128) - 1024)  # Qwen3-0.6B without norms
    keys = min(256 * 600, 100 * 256) * 114_688  # no more than the pool holds: some are shared
    assert share == pytest.approx((weights + keys) / 4.3e12 / 0.004, rel=1e-3)
    half = summary_of(path, made, bandwidth=8.6e12, flops=790e12).roofline_share
    assert share == pytest.approx(2 * (half or 0), rel=1e-3)
    for facts in ({**H200, "device_name": "NVIDIA H100"}, {**H200, "dtype": "float32"}, CPU):
        assert summary_of(path, busy(facts)).roofline_share is None
    assert summary_of(path, busy(CPU), bandwidth=1e11, flops=1e12).roofline_share
    two = summary_of(path, busy({**H200, "tensor_parallel_size": 2})).roofline_share
    assert share == pytest.approx(2 * (two or 0))


# -- bottlenecks -----------------------------------------------------------------------------------


def run(*parts: tuple[int, dict[str, Any]], facts: dict[str, Any] = H200) -> MadeTrace:
    """A trace with `count` steps of each kind, one kind after the other."""
    made = MadeTrace(facts)
    for count, options in parts:
        for _ in range(count):
            made.step(**{"seconds": 0.004, "decode": 256, **options})
    return made.sequence()


PROMPT = {"seconds": 0.010, "decode": 200, "prefill": 4000, "held_by": "tokens"}
RUNS: dict[str, tuple[MadeTrace, list[str]]] = {
    "nothing": (run((100, {})), [findings.NOTHING]),
    "blocks": (run((50, {}), (50, {"held_by": "blocks"})), [findings.BLOCKS]),
    "hardly any wait for blocks": (run((91, {}), (9, {"held_by": "blocks"})), [findings.NOTHING]),
    "prompts": (run((20, {}), (60, PROMPT)), [findings.PREFILL]),
    "fewer prompts": (run((70, {}), (30, PROMPT)), [findings.NOTHING]),
    "prompts alone": (run((9, {"prefill": 9999, "decode": 0})), [findings.PREFILL]),
    "a GPU that waits": (run((100, {"gpu": 0.6})), [findings.HOST]),
    "a GPU that hardly waits": (run((100, {"gpu": 0.91})), [findings.NOTHING]),
    "few": (run((100, {"decode": 8})), [findings.FEW_SEQUENCES]),
    "few, and a GPU that waits": (
        run((100, {"decode": 1, "gpu": 0.3})),
        [findings.FEW_SEQUENCES, findings.HOST],
    ),
    "few may run": (
        run((9, {"decode": 16, "held_by": "sequences"}), facts={**H200, "max_num_seqs": 16}),
        [findings.FEW_SEQUENCES],
    ),
    "as many as may run, and not few": (run((9, {"held_by": "sequences"})), [findings.NOTHING]),
    "few on a CPU": (run((100, {"decode": 8}), facts=CPU), [findings.FEW_SEQUENCES]),
    "not few for a CPU": (run((100, {"decode": 32}), facts=CPU), [findings.NOTHING]),
    "a tail": (run((70, {}), (30, {"decode": 10})), [findings.TAIL]),
    "few at the beginning": (run((30, {"decode": 10}), (70, {})), [findings.NOTHING]),
    "few now and then": (run(*[(14, {}), (6, {"decode": 10})] * 5), [findings.NOTHING]),
    "much is computed again": (
        run((20, {}), (60, {**PROMPT, "held_by": "", "preempted": 1})),
        [findings.PREFILL, findings.BLOCKS],
    ),
}


def pictures(count: int, waiting: int, **options: Any) -> MadeTrace:
    """Steps, before each of which a request waits for an image as long as the step takes."""
    made = MadeTrace()
    for _ in range(count):
        made.images(waiting, prepared=1, wait=0.004)
        made.images(0).step(**{"seconds": 0.004, "decode": 256, **options})
    return made.sequence(seconds=made.now - made.begin)


RUNS |= {
    "images": (pictures(50, 3), [findings.IMAGES]),
    "images, and few sequences": (pictures(50, 3, decode=8), [findings.IMAGES]),
    "a wait without images": (pictures(50, 0), [findings.HOST]),
    "images, and a GPU that waits": (
        pictures(50, 3, gpu=0.5),
        [findings.IMAGES, findings.HOST],
    ),
}


def test_images_that_are_not_ready_are_named_with_their_rate(path: Path) -> None:
    [finding] = find(summary_of(path, pictures(50, 3)))
    assert finding.share == pytest.approx(49 / 99), "the trace begins with a step"
    assert "50 images were prepared, 126.3 a second" in finding.text and "20.0 ms" in finding.text
    assert "CPU cores" in finding.remedy and "`max_pixels`" in finding.remedy


@pytest.mark.parametrize("name", RUNS)
def test_each_cause_is_found_and_no_other(name: str, path: Path) -> None:
    made, wanted = RUNS[name]
    found = find(summary_of(path, made))
    assert [finding.cause for finding in found] == wanted
    for finding in found:
        assert finding.text.endswith(".") and finding.remedy.endswith(".")
        assert finding.text.count("`") % 2 == finding.remedy.count("`") % 2 == 0


def test_causes_name_the_options_that_mend_them(path: Path) -> None:
    facts = {**H200, "overlap": False, "cuda_graphs": 0, "enable_prefix_caching": False}
    made = run((10, {"gpu": 0.5}), (30, {**PROMPT, "gpu": 0.5}), facts=facts)
    prompts, host = find(summary_of(path, made))
    assert (
        "`enable_prefix_caching`" in prompts.remedy and "`max_num_batched_tokens`" in prompts.text
    )
    assert "`overlap`" in host.remedy and "`enforce_eager`" in host.remedy
    made = MadeTrace()
    for _ in range(9):
        made.step(0.004, decode=256, gpu=0.9)
        made.now += 0.004  # in a listener, say
    [host] = find(summary_of(path, made.sequence()))
    assert "the caller's own code" in host.text and "listeners" in host.remedy
    made = run((10, {"held_by": "blocks", "preempted": 2, "prefill": 100}))
    [waits] = find(summary_of(path, made))
    assert (
        "After 20 preemptions, 600 tokens were computed again" in waits.text
    )  # 10 * 100, of a prompt of 400
    assert "`kv_cache_dtype=" in waits.remedy and "`max_num_seqs`" in waits.remedy


TINY_POOL = {**SMALL, "num_kvcache_blocks": 12}
CROWD = [[i + 1] * 12 for i in range(24)]


def test_memory_for_states_is_no_fault_of_an_option(path: Path) -> None:
    few = {"decode": 16, "held_by": "sequences"}
    for asked, remedy in ((16, "Raise `max_num_seqs`."), (512, "Leave more memory for states")):
        facts = {**H200, "max_num_seqs": 16, "asked_num_seqs": asked}
        [finding] = find(summary_of(path, run((9, few), facts=facts)))
        assert finding.cause == findings.FEW_SEQUENCES and finding.remedy.startswith(remedy)


def test_causes_of_real_runs(checkpoint: Path, path: Path) -> None:
    """Engines on a CPU, which are made to suffer from one cause each."""

    def causes(llm: LLM, *calls: tuple[Any, Any]) -> list[str]:
        with llm.trace(path):
            for prompts, params in calls:
                llm.generate(prompts, params, use_tqdm=False)
        return [finding.cause for finding in find(Summary(read_trace(str(path))))]

    with LLM(checkpoint, **TINY_POOL) as llm:
        # After short outputs long ones are not expected, and sequences preempt each other.
        found = causes(llm, (CROWD, greedy(2)), (CROWD, greedy(60)))
        assert findings.BLOCKS in found and llm.metrics()["num_preemptions"]
        assert Summary(read_trace(str(path))).num_repeated_tokens > 0
        assert findings.PREFILL in causes(llm, ([[i] * 60 for i in range(40)], greedy(1)))
        assert causes(llm, (CROWD[:2], greedy(40))) == [findings.FEW_SEQUENCES]


# -- files that are no traces ----------------------------------------------------------------------


def test_a_torn_trace_is_read_as_far_as_it_goes(path: Path) -> None:
    whole = write_trace(path, busy()).read_text()
    path.write_text(whole[: len(whole) * 3 // 4])
    summary = Summary(read_trace(str(path)))
    assert not summary.trace.has_ended
    assert 60 < len(summary.trace.engines[0]["seconds"]) < 90


WHOLE = [line.rstrip(",") for line in busy(steps=3).lines]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "must be a trace of nanovllm"),
        ("[]", "must be a trace of nanovllm"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm"}]}', "must be a trace of"),
        ("\x00\xff\x80" * 100, "must be a trace of nanovllm"),
        ('[\n{"cat":"step", torn\n{"cat":"step"}\n', "must be a trace of nanovllm"),
        ('[\n{"cat":"step","name":"decode","pid":0,"args":{}}\n', "must be a trace of nanovllm"),
        ("steps only", "must be a trace of nanovllm"),
        ("no steps", "has no step: nothing was computed"),
    ],
)
def test_other_files_get_a_sentence(
    content: str | None, message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content == "no steps":
        write_trace(path, MadeTrace())
    elif content == "steps only":
        path.write_text("[\n" + ",\n".join(WHOLE) + "\n]\n")
    elif content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert not path.with_suffix(".html").exists()


def test_a_page_is_not_written_over_its_trace(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(path, busy())
    assert main(["report", str(path), "-o", str(path)]) == 2
    assert "another file than the trace" in capsys.readouterr().err


def test_without_plotly_the_words_are_printed_all_the_same(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(path, busy(gpu=0.5))
    assert main(["report", str(path)]) == 0
    words = capsys.readouterr().out.partition(f"\n\n{path.with_suffix('.html')}")[0]
    path.with_suffix(".html").unlink()
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError("No module named 'plotly'")
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for module in [name for name in sys.modules if name.startswith("nanovllm.report.")]:
        monkeypatch.delitem(sys.modules, module)
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (
        out == f"{words}\n" and "Host-bound" in out and "64,000 tok/s generation throughput" in out
    )
    assert err.count("\n") == 1 and err.endswith('plotly\'): pip install "plotly>=6"\n')
    assert not path.with_suffix(".html").exists()


# -- words and ticks -------------------------------------------------------------------------------


def test_key_figures_are_one_kind_of_phrase(path: Path) -> None:
    one = MadeTrace().step(0.004, decode=1, prefill=9, preempted=1).sequence(prompt=4)
    found = key_figures(summary_of(path, one))
    assert [" ".join(each[:2]) for each in found] == [
        *(
            "500 tok/s generation throughput",
            "2,250 tok/s prefill throughput",
            "1 request finished",
        ),
        *("4 ms first step to last", "1 step", "2.0 running sequences on average"),
        *("10% peak KV pool usage", "0% prefix cache hit rate", "1 preemption"),
        *("97% GPU busy time", "7.7% share of the roofline"),
    ]
    assert [more for _, _, more in found] == [
        *("2 tokens", "9 tokens", "", "100% with requests", "4 ms each", "limit 512"),
        *("1,000 blocks of 256 tokens", "", "5 tokens recomputed", "", ""),
    ]


@pytest.mark.parametrize(("count", "steps"), [(1, {1}), (6, {1}), (7, {None}), rare(300, {None})])
def test_axes_that_count_have_whole_ticks(count: int, steps: set[int | None], path: Path) -> None:
    """plotly has ticks at halves where it may draw more than there are whole ones."""
    made = MadeTrace()
    for _ in range(9):
        made.step(0.004, decode=count, held_by="blocks")
    for _ in range(count):
        made.sequence()
    drawn = {each.name: each.figure.layout for each in charts(summary_of(path, made))}
    assert drawn["sequences"].yaxis.dtick in steps and drawn["sequences"].yaxis2.dtick is None
    layout = drawn["latencies"]
    assert {layout[f"yaxis{i}"].dtick for i in ("", 2, 3, 4)} == steps


@pytest.mark.parametrize(
    ("waits", "says"),
    [
        ([], "None waited."),
        ([("blocks", 9)], "no free KV blocks (100%)."),
        ([("sequences", 1), ("blocks", 3)], "no free KV blocks (75%), max_num_seqs reached (25%)."),
        (
            [("tokens", 7), ("", 40), ("prefix", 3)],
            "max_num_batched_tokens reached (70%), shared prefix being computed (30%).",
        ),
    ],
)
def test_batch_occupancy_gives_the_reasons_for_waiting(
    waits: list[tuple[str, int]], says: str, path: Path
) -> None:
    """The text once blamed `max_num_seqs` also where sequences waited for KV blocks."""
    made = MadeTrace().step(0.004, decode=9)
    for reason, count in waits:
        for _ in range(count):
            made.step(0.004, decode=9, held_by=reason)
    text = next(each for each in charts(summary_of(path, made)) if each.name == "sequences").text
    assert text.startswith("Running sequences (max_num_seqs: 512). ")
    assert text.endswith(says if not waits else f"why the first had to wait: {says}")


# -- the page --------------------------------------------------------------------------------------

BROWSER = pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt-get install chromium")


def drawn(page: str) -> list[str]:
    """The charts that plotly.js has drawn in a document."""
    found = re.findall(r'<div class="plot js-plotly-plot" id="(\w+)"[^>]*>(.*?)</svg>', page, re.S)
    return [name for name, inner in found if 'class="main-svg"' in inner]


@BROWSER
@pytest.mark.parametrize("kind", ["gpu", rare("replicas"), rare("cpu")])
def test_the_page_draws_all_charts_without_an_error(kind: str, tmp_path: Path, path: Path) -> None:
    hostile = {**H200, "model": "</script><b>&"}
    wanted = ["throughput", "sequences", "pool", "waiting", "host", "roofline", "latencies"]
    if kind == "gpu":
        write_trace(path, run((50, {}), (50, {"held_by": "blocks", "preempted": 1}), facts=hostile))
    elif kind == "replicas":
        facts = {**H200, "data_parallel_size": 3}
        write_trace(path, *(replace_pid(busy(facts), i) for i in range(3)))
        path.write_text(path.read_text().replace('"replica 1"', '"</script><script>alert(1)"'))
        wanted = [name for name in wanted if name != "waiting"] + ["replicas"]
    else:
        write_trace(path, run((1, {"decode": 3}), facts=CPU))
        wanted = ["throughput", "sequences", "pool", "host", "latencies"]
    assert main(["report", str(path)]) == 0
    html = path.with_suffix(".html")
    text = html.read_text().replace(get_plotlyjs(), "")
    assert not re.search(r"(src|href|url|import)\b\s*[=(]", text), "it loads nothing"
    page, console = browse(html, tmp_path)
    assert console == []
    assert drawn(page) == wanted
    assert page.count('class="card finding') == len(find(Summary(read_trace(str(path)))))
    if kind == "cpu":
        ticks = re.findall(r'class="y\d?tick">.*?>([^<]*)<', page.partition('id="latencies"')[2])
        assert ticks == ["0", "1"] * 4
    if kind == "gpu":
        assert "<title>A run of &lt;/script&gt;&lt;b&gt;&amp;, 400 ms</title>" in page
    assert ("cannot tell whether" in page) == (kind == "cpu")


@BROWSER
def test_the_browser_check_can_fail(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(
        "<!DOCTYPE html><div class='plot' id='a'></div><script>Plotly.react()</script>"
    )
    page, console = browse(broken, tmp_path)
    assert drawn(page) == [] and "Plotly is not defined" in console[0]


def test_the_page_holds_any_run_in_a_few_megabytes(path: Path) -> None:
    """However many steps there were."""
    sizes = []
    for steps in (300, 3000):
        write_trace(path, busy(steps=steps))
        assert main(["report", str(path)]) == 0
        sizes.append(path.with_suffix(".html").stat().st_size)
    assert sizes[1] - sizes[0] < 50_000 and sizes[1] < 6_000_000


def test_the_words_are_printed_and_say_what_is_missing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_trace(path, busy(gpu=0.5)).read_text()
    path.write_text(text.replace("recording ended", "recording is full"))
    assert main(["report", str(path), "-o", str(path.with_name("page.html"))]) == 0
    out = capsys.readouterr().out
    for words in (
        *("64,000 tok/s generation throughput (25,600 tokens)", "50% GPU busy time"),
        *(
            "file was full after 400 ms",
            "has no end",
            "Bottlenecks:\n\nHost-bound (50% of the time)\nThe GPU",
        ),
        *("10 requests finished", "page.html", "Qwen3ForCausalLM, bfloat16, on NVIDIA H200"),
    ):
        assert words in out
