"""`Generate` and `RayGenerate` on batches of each kind, against `LLM.generate`."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

import nanovllm.llm
from nanovllm import LLM, SamplingParams
from nanovllm.batch import Generate, RayGenerate

OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 8, "max_num_seqs": 4}
GREEDY = {"temperature": 0, "max_tokens": 8}
PROMPTS = ["127+345=", "reverse: hello =", "1" * 5000, "count from 17:", "100+200="]
ADDED = ["generated_text", "finish_reason", "num_prompt_tokens", "num_generated_tokens", "error"]


@pytest.fixture(name="generate", scope="module")
def generate_fixture(tiny: str) -> Iterator[Generate]:
    with Generate(tiny, sampling_params=GREEDY, **OPTIONS) as generate:
        yield generate


@pytest.fixture(name="expected", scope="module")
def expected_fixture(tiny: str) -> dict[str, list[Any]]:
    """Results of the engine in one call."""
    with LLM(tiny, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), False, on_error="return")
        with pytest.raises(ValueError) as refusal:
            llm.add_request(PROMPTS[2])
    rows = [
        (o["text"], o["finish_reason"], len(o.prompt_token_ids), len(o["token_ids"]), None)
        if o.error is None
        else (None, None, None, None, str(refusal.value))
        for o in outputs
    ]
    return dict(zip(ADDED, map(list, zip(*rows, strict=True)), strict=True))


TABLE = pyarrow.table({"id": range(5), "prompt": PROMPTS}, metadata={"of": "the caller"})
BATCHES: dict[str, Any] = {
    "numpy": {"id": np.arange(5), "prompt": np.array(PROMPTS, dtype=object)},
    "numpy strings": {"id": np.arange(5), "prompt": np.array(PROMPTS)},
    "pandas": pandas.DataFrame({"id": range(5), "prompt": PROMPTS}, index=list("abcde")),
    "arrow": TABLE,
    "arrow in chunks": pyarrow.concat_tables([TABLE.slice(0, 2), TABLE.slice(2)]),
    "record batch": TABLE.to_batches()[0],
}


def columns(batch: Any) -> dict[str, list[Any]]:
    """Columns as lists, with None for missing values."""
    if isinstance(batch, dict):
        return {name: column.tolist() for name, column in batch.items()}
    if isinstance(batch, pandas.DataFrame):
        named = batch.to_dict("list").items()
        return {name: [None if value is pandas.NA else value for value in c] for name, c in named}
    return batch.to_pydict()


@pytest.mark.parametrize("kind", list(BATCHES))
def test_a_batch_comes_back_with_its_answers(
    kind: str, generate: Generate, expected: dict[str, list[Any]]
) -> None:
    before = columns(BATCHES[kind])
    answered = generate(BATCHES[kind])
    assert type(answered) is type(BATCHES[kind])
    assert columns(answered) == {**before, **expected}
    assert columns(BATCHES[kind]) == before
    again = generate(answered)  # replaces its columns
    assert columns(again) == columns(answered) and list(columns(again)) == list(columns(answered))
    if kind == "pandas":
        assert list(answered.index) == list("abcde")
    if kind.startswith("arrow"):
        assert answered.schema.metadata == {b"of": b"the caller"}


@pytest.mark.parametrize("kind", ["pandas", "arrow", "record batch"])
def test_types_do_not_depend_on_values(kind: str, generate: Generate) -> None:
    """Parts of a data set are written apart, and read as one: nulls alone would have no type."""
    batch = BATCHES[kind]
    one = generate(batch[:1])
    none, refused = generate(batch[:0]), generate(batch[2:3])
    if kind == "pandas":
        assert one.dtypes[ADDED].tolist() == ["string", "string", "Int64", "Int64", "string"]
        assert (none.dtypes == one.dtypes).all() and (refused.dtypes == one.dtypes).all()
    else:
        text, number = pyarrow.string(), pyarrow.int64()
        assert [one.schema.field(name).type for name in ADDED] == [text, text, number, number, text]
        assert none.schema == refused.schema == one.schema
    assert len(columns(none)["error"]) == 0 and columns(refused)["generated_text"] == [None]


def test_numbers_without_gaps_are_integers(generate: Generate) -> None:
    answered = generate({"prompt": np.array(["1+1="])})
    assert answered["num_prompt_tokens"].dtype == answered["num_generated_tokens"].dtype == np.int64


ROWS: list[Any] = [
    None,
    {"max_tokens": 2.0},  # as pandas has it where others have none
    json.dumps({"stop": ["7"], "max_tokens": None}),
    '{"logit_bias": {"57": 1e6}, "max_tokens": 3.0}',
    {"max_token": 2},
    "{",
    "[1]",
]


@pytest.mark.parametrize("kind", ["numpy", "pandas"])
def test_rows_have_parameters_of_their_own(kind: str, generate: Generate) -> None:
    """Over those of the constructor; what is wrong is the row's error."""
    batch: Any = {
        "prompt": np.array(["127+345="] * 7),
        "sampling_params": np.array(ROWS, dtype=object),
    }
    answered = columns(generate(pandas.DataFrame(batch) if kind == "pandas" else batch))
    assert answered["generated_text"] == ["472", "47", "4", "999", None, None, None]
    *right, name, text, item = answered["error"]
    assert right == [None] * 4
    assert name.startswith("SamplingParams() has no option `max_token`; did you mean")
    assert text.startswith("`sampling_params` must be JSON where it is text, got '{'")
    assert item == "`sampling_params` must be an object, got [1]"


def test_columns_of_structs_have_nulls_for_other_rows_fields(generate: Generate) -> None:
    table = pyarrow.table(
        {
            "prompt": [[*b"127+345="]] * 3,
            "sampling_params": [{"max_tokens": 1}, {"stop": ["7"]}, None],
        }
    )
    assert generate(table)["generated_text"].to_pylist() == ["4", "4", "472"]


def test_conversations(tiny: str) -> None:
    """Dictionaries, JSON, or prompts, against `LLM.chat`."""
    turns = ["127+345=", "reverse: hello ="]
    messages = [[{"role": "user", "content": turn}] for turn in turns]
    with LLM(tiny, **OPTIONS) as llm:
        outputs = llm.chat(messages, SamplingParams(**GREEDY), False)
    expected = [o["text"] for o in outputs], [len(o.prompt_token_ids) for o in outputs]

    def found(answered: Any) -> tuple[list[Any], list[Any]]:
        return answered["generated_text"].tolist(), answered["num_prompt_tokens"].tolist()

    with Generate(tiny, messages_column="talk", sampling_params=GREEDY, **OPTIONS) as generate:
        column = np.empty(2, dtype=object)
        column[:] = [np.array(talk, dtype=object) for talk in messages]  # as Ray has it
        assert found(generate({"talk": column})) == expected
        texts = [json.dumps(talk) for talk in messages]
        assert found(generate(pandas.DataFrame({"talk": texts}))) == expected
    with Generate(tiny, chat=True, sampling_params=SamplingParams(**GREEDY), **OPTIONS) as generate:
        assert found(generate({"prompt": np.array(turns)})) == expected


def test_a_row_with_an_id_is_drawn_alike_wherever_it_is(tiny: str) -> None:
    """So a row that is computed again, in another batch, has its answer; others differ."""
    params = {"temperature": 5.0, "min_tokens": 8, "max_tokens": 8, "n": 2}
    ids, prompts = np.arange(6), np.array(["abc"] * 6)
    with Generate(tiny, id_column="id", sampling_params=params, **OPTIONS) as generate:
        whole = generate({"id": ids, "prompt": prompts})["outputs"].tolist()
        assert generate({"id": ids[::-1], "prompt": prompts})["outputs"].tolist() == whole[::-1]
        assert generate({"id": ids[4:], "prompt": prompts[4:]})["outputs"].tolist() == whole[4:]
        with_gap = pandas.DataFrame({"id": [5, None, 3], "prompt": prompts[:3]})
        assert with_gap["id"].dtype == np.float64
        assert generate(with_gap)["outputs"].tolist()[::2] == [whole[5], whole[3]]
    assert len(set(whole)) == 6
    both = [[each["text"] for each in json.loads(text)] for text in whole]
    assert all(first != second for first, second in both)
    with Generate(tiny, sampling_params=params, **OPTIONS) as generate:
        batch = {"prompt": prompts}
        drawn = [*generate(batch)["generated_text"], *generate(batch)["generated_text"]]
    assert len(set(drawn)) == 12


def test_map_reads_the_next_batches_while_one_is_answered(generate: Generate) -> None:
    """The engine then has twice as many rows as it runs at once, besides those of the first."""
    read: list[int] = []

    def batches() -> Iterator[Any]:
        for i in range(6):
            read.append(i)
            yield pandas.DataFrame({"i": [i] * 4, "prompt": [f"{i}+1="] * 4})

    answered = generate.map(batches())
    first = next(answered)
    assert read == [0, 1, 2]
    found = pandas.concat([first, *answered])
    assert found["i"].tolist() == [i for i in range(6) for _ in range(4)]
    assert found["generated_text"].tolist() == [
        text for i in range(6) for text in [generate({"prompt": [f"{i}+1="]})["generated_text"][0]]
        for _ in range(4)
    ]  # fmt: skip


def test_batches_share_the_engine(tiny: str) -> None:
    """A short batch does not wait for the end of a long one that came before."""

    async def both() -> list[str]:
        ended = []

        async def answer(name: str, max_tokens: int) -> None:
            params = json.dumps({"max_tokens": max_tokens, "ignore_eos": True})
            batch = {"prompt": np.array(["1+1="]), "sampling_params": np.array([params])}
            async for answered in generate(batch):  # type: ignore[attr-defined]
                assert answered["num_generated_tokens"].tolist() == [max_tokens]
                ended.append(name)

        await asyncio.gather(answer("long", 100), answer("short", 2))
        return ended

    with RayGenerate(tiny, sampling_params=GREEDY, **OPTIONS) as generate:
        assert asyncio.run(both()) == ["short", "long"]


def fail_at_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    steps = iter(range(1, 100))
    step = LLM.step

    def failing(llm: LLM) -> Any:
        if next(steps) == number:
            raise RuntimeError("a GPU is lost")
        return step(llm)

    monkeypatch.setattr(LLM, "step", failing)


def test_an_engine_that_fails_ends_all_calls(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_step(monkeypatch, 3)
    generate = Generate(tiny, sampling_params=GREEDY, **OPTIONS)
    errors: list[Exception] = []

    def call() -> None:
        try:
            generate({"prompt": np.array(["1+1="] * 9)})
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    call()
    assert [str(error) for error in errors] == ["a GPU is lost"] * 4
    generate.exit()


def test_under_ray_the_process_ends_where_the_engine_fails(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And for nothing else."""

    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    async def call(batch: Any) -> Any:
        async for answered in generate(batch):  # type: ignore[attr-defined]
            return answered

    monkeypatch.setattr(os, "_exit", end)
    fail_at_step(monkeypatch, 2)
    generate = RayGenerate(tiny, sampling_params=GREEDY, **OPTIONS)
    with pytest.raises(ValueError, match="a batch must have a column 'prompt', got text"):
        asyncio.run(call({"text": np.array(["1+1="])}))
    refused = asyncio.run(call({"prompt": np.array(["1" * 5000])}))
    assert refused["error"][0].startswith("`prompt` must leave room")
    for _ in range(2):
        with pytest.raises(Ended) as error:
            asyncio.run(call({"prompt": np.array(["1+1="])}))
        assert error.value.args == (1,)
    assert capsys.readouterr().err.count("RuntimeError: a GPU is lost\n") == 2
    generate.exit()


def test_closed_and_left(tiny: str) -> None:
    generate = Generate(tiny, sampling_params=GREEDY, **OPTIONS)
    engine = generate._engine
    generate.exit()
    generate.exit()
    with pytest.raises(RuntimeError, match="this engine is closed: build a new Generate"):
        generate({"prompt": np.array(["1+1="])})
    assert engine.ended.is_set()
    left = Generate(tiny, **OPTIONS)
    engine = left._engine
    del left  # nobody holds it: its thread ends by itself
    assert engine.ended.wait(60)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"prompt_column": "a", "messages_column": "b"},
            ValueError,
            "`prompt_column` must be left",
        ),
        (
            {"sampling_params": [1]},
            TypeError,
            "`sampling_params` must be a Sampl",
        ),
        ({"sampling_params": {"temperature": -1}}, ValueError, "`temperature` must be finite"),
        ({"sampling_params": {"top": 1}}, TypeError, r"SamplingParams\(\) has no option `top`"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nanovllm.llm, "LLM", None)  # must not be reached
    with pytest.raises(error, match=message):
        Generate("/nowhere", **options)


def test_wrong_batches_are_refused(generate: Generate) -> None:
    with pytest.raises(TypeError, match=r"a batch must be a dictionary of columns.* got list"):
        generate([{"prompt": "1+1="}])
    with pytest.raises(ValueError, match="a batch must have a column 'prompt', got text, id"):
        generate(pandas.DataFrame({"text": ["1+1="], "id": [1]}))
