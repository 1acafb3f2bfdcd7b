"""Jobs over many rows: an iterator of rows in, an iterator of results out, and a sink that keeps
the results from one run of a job to the next. Importing it imports no torch.

    from nanovllm import LLM, TINY, SamplingParams
    from nanovllm.batch import ResumableSink, read_rows, run

    params = SamplingParams(temperature=0)
    with LLM(TINY) as llm, ResumableSink("out.jsonl", {"model": TINY}) as sink:
        for result in run(llm, sink.unfinished(read_rows("prompts.jsonl")), params):
            sink.write(result)

The same script, run again, continues where it was killed. `nanovllm generate` is the same on a
command line.

Doors: `reading`, `rows`, `job`, `results` and `sink`, which are exported here; `ahead`
and `identity` for the command line.
"""

from nanovllm.batch.generate import Generate, RayGenerate
from nanovllm.batch.job import run
from nanovllm.batch.reading import read_rows
from nanovllm.batch.results import Result
from nanovllm.batch.rows import Row
from nanovllm.batch.sink import ResumableSink

__all__ = ["Generate", "RayGenerate", "Result", "ResumableSink", "Row", "read_rows", "run"]
