"""Progress bars: all that is loaded and captured is counted, quick starts and silence are quiet."""

import contextlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from checkpoints import SMALL, make_checkpoint
from nanovllm import LLM
from nanovllm.graphs import step_graphs as graph_runner
from nanovllm.utils import progress


@pytest.fixture
def no_delay(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0)


def shown(text: str, desc: str) -> set[tuple[str, int, int]]:
    """(percent, done, total) of every state that the bar with this name showed."""
    found = re.findall(rf"{desc}: +(\d+)%\|[^|]*\| (\d+)/(\d+) ", text)
    return {(int(percent), int(done), int(total)) for percent, done, total in found}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("shard", ["1GB", "100KB"], ids=["whole", "sharded"])
def test_every_tensor_is_counted(shard, load_format, tmp_path, capfd, no_delay):
    path = make_checkpoint(tmp_path / "model", shard=shard)
    capfd.readouterr()
    with LLM(path, load_format=load_format, **SMALL):
        out, err = capfd.readouterr()
    # 9 + 2 of a layer; a packed projection is one parameter, and three or two tensors
    total = 2 * 11 + 3
    assert out == ""
    assert (100, total, total) in shown(err, "Loading weights")


def test_bar_of_a_load_that_fails_is_closed(monkeypatch, tmp_path, capfd, no_delay):
    path = make_checkpoint(tmp_path / "model")

    def fill(shard, source):
        raise ValueError("no more")

    monkeypatch.setattr("nanovllm.layers.weights.shard.Shard.fill", fill)
    capfd.readouterr()
    with pytest.raises(ValueError, match="no more") as error:
        LLM(path, **SMALL)
    err = capfd.readouterr().err
    assert error.tb, "which keeps the bar alive"
    assert shown(err, "Loading weights") and err.endswith("\n")


def test_every_graph_is_counted(monkeypatch, capfd, no_delay):
    """Without CUDA: what is captured stands in for itself."""
    stub = SimpleNamespace(fill=lambda *args: None, view=lambda shape: shape.decodes)
    monkeypatch.setattr(graph_runner, "StaticInputs", lambda *args: stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: 1))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
    computed = []
    graphs = graph_runner.StepGraphs(computed.append, torch.device("cpu"), 40, 1)
    assert graphs.sizes == [1, 2, 4, 8, 16, 32, 40]
    assert computed[::2] == computed[1::2] == graphs.sizes[::-1], "largest first"
    assert (100, 7, 7) in shown(capfd.readouterr().err, "Capturing CUDA graphs")


def test_what_is_done_at_once_shows_no_bar(checkpoint, monkeypatch, capfd):
    monkeypatch.setattr(progress, "DELAY", 1e9)  # and not a second: this machine may be slow
    with LLM(checkpoint, **SMALL):
        assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.parametrize("where", ["a terminal", "a notebook"])
def test_tqdm_disable_silences_every_bar(where, disable):
    """tqdm reads its variable when it is imported, and its bars of notebooks do not mind it; a
    `disable=False` of ours would overrule it. Nor is there a semaphore, which a worker that is
    killed while it opens one leaves in /dev/shm.
    """
    if where == "a notebook":
        pytest.importorskip("ipywidgets", reason='not installed: pip install ".[examples]"')
    code = f"""if True:
        import multiprocessing.synchronize
        semaphores, create = [], multiprocessing.synchronize.SemLock.__init__
        def record(self, *args, **options):
            semaphores.append(self)
            create(self, *args, **options)
        multiprocessing.synchronize.SemLock.__init__ = record
        import tqdm.auto, tqdm.notebook
        if {where == "a notebook"}:
            tqdm.auto.tqdm = tqdm.notebook.tqdm
            tqdm.notebook.display = lambda bar: print(bar.pbar.desc)
        from nanovllm.tracing.metrics import Metrics, Progress
        from nanovllm.utils import progress
        progress.DELAY = 0
        with progress.startup_bar(range(3), "start", "it") as bar:
            list(bar)
        assert bool(semaphores) != {disable}
        with Progress(3, Metrics(), enabled=True) as bar:
            bar.update(3)
    """
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    env |= {"TQDM_DISABLE": "1"} if disable else {}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    if where == "a notebook":
        assert done.stdout.split() == ([] if disable else ["start", "Generating"])
    else:
        for name in ("start", "Generating"):
            assert bool(shown(done.stderr, name)) != disable
