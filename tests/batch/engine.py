"""A stand-in for an engine, which answers rows in no order of theirs.

As a script, `python engine.py ROWS`, it runs a job of so many rows and prints the most memory that
the process had, in KiB.
"""

import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from nanovllm import CompletionOutput, RequestOutput, SamplingParams
from nanovllm.batch import ResumableSink, read_rows, run
from nanovllm.images.prompts import NoImages


class StandIn:
    """Runs `max_num_seqs` requests at once; some of them end in each step, the prompt "slow" last.

    Attributes:
        asked: prompts and parameters, in the order they came in.
        counts: requests that were there at each step.
    """

    tokenizer = None
    image_prompts = NoImages("it is a stand-in")
    is_closed = False
    core = SimpleNamespace(has_room=True)

    def __init__(self, max_num_seqs=4, keep=True, rate=0.5):
        self.config = SimpleNamespace(
            model="/models/name", max_num_seqs=max_num_seqs, data_parallel_size=1, seed=0
        )
        self.random = random.Random(0)
        self.waiting, self.asked, self.counts = {}, [], []
        self.keep, self.rate, self.number = keep, rate, 0

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0, max_tokens=5)

    def add_request(self, prompt, params):
        if "bad" in prompt:
            raise ValueError("`prompt` must be good, got a bad one")
        self.number += 1
        self.waiting[self.number] = prompt
        if self.keep:
            self.asked.append((prompt, params))
        return self.number

    def step(self):
        if self.keep:
            self.counts.append(len(self.waiting))
        running = [*self.waiting][: self.config.max_num_seqs]
        ended = [i for i in running if self.random.random() < self.rate]
        if len(self.waiting) > 1:
            ended = [i for i in ended if self.waiting[i] != "slow"]
        return [
            RequestOutput(
                i,
                prompt := self.waiting.pop(i),
                [1],
                [CompletionOutput(0, prompt[::-1], [1, 2], "stop")],
                True,
                0,
            )
            for i in ended
        ]

    def is_finished(self):
        return not self.waiting

    def abort_all(self):
        self.waiting.clear()


def main(count):
    """A job with a line for each row."""
    with Path("in.jsonl").open("w") as file:
        file.writelines(f'{{"prompt": "{i:06} {"x" * 400}"}}\n' for i in range(count))
    with ResumableSink("out.jsonl") as sink:
        for result in run(StandIn(64, keep=False), sink.unfinished(read_rows("in.jsonl"))):
            sink.write(result)
    # Not getrusage, whose figure begins with that of the process that started this one.
    [most] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(most)


if __name__ == "__main__":
    main(int(sys.argv[1]))
