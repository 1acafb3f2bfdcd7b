"""Engines on a CPU in forked processes, which have none of the threads of their parents."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tiny_reference import assert_greedy

SCRIPT = """
import faulthandler, json, logging, os, sys
import torch
from transformers import AutoTokenizer  # once, not in each child
from nanovllm import LLM, SamplingParams, TINY

model, prompts = TINY, json.loads(sys.argv[1])
options = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 32}


def compute():
    torch.ones(1 << 20).add_(1)


def child(sets=False):
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with open(read) as file:
            said = file.read()
        assert os.waitpid(pid, 0)[1] == 0, "it hangs"
        print(said)
        return
    faulthandler.dump_traceback_later(60, exit=True)  # a hang becomes a failure
    warnings = []
    logger = logging.getLogger("nanovllm.threads.forks")
    logger.addFilter(lambda record: warnings.append(record.getMessage()))
    if sets:
        torch.set_num_threads(3)
    found = []
    for _ in range(2):
        with LLM(model, **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), False)
            found.append([output["token_ids"] for output in outputs])
    compute()
    os.write(write, json.dumps([torch.get_num_threads(), warnings, found]).encode())
    os._exit(0)


torch.set_num_threads(3)
child()
compute()
child()
child(sets=True)
torch.set_num_threads(1)
child()
"""


@pytest.mark.slow  # missing threads are waited for, seconds each time
def test_an_engine_computes_in_a_fork(reference: Any) -> None:
    """Compute with one thread after a parent that has computed with several, where PyTorch waited
    forever for missing threads; with all threads after any other parent.
    """
    prompts = [[*b"127+345="], [231, 5, 97, 94, 200, 13], [*b"reverse: hello ="]]
    command = [sys.executable, "-c", SCRIPT, json.dumps(prompts)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    unused, used, sets, one = map(json.loads, done.stdout.splitlines())
    for _, _, found in (unused, used, sets, one):
        assert found[0] == found[1]
        assert_greedy(reference, prompts, found[0], 6)
    assert (unused[:2], one[:2]) == ([3, []], [1, []])
    for count, warnings, _ in (used, sets):
        assert count == 1 and len(warnings) == 1
        assert "this process is a fork without PyTorch's threads" in warnings[0]
        assert "one thread, not with 3" in warnings[0]
