"""Tokenizers of sentencepiece's kind through the whole engine: a completion keeps its first space.

Such a tokenizer leaves out the first space of whatever it decodes. What a completion adds to its
prompt is told by transformers, from all tokens of both.
"""

import asyncio
import io
import json
import sys
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from checkpoints import SMALL, gather, greedy, make_checkpoint
from nanovllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.batch import read_rows, run
from nanovllm.sampling.structured_output import GrammarCompiler

WORDS = ["the", "a", "b", "yes", "no", "Paris", "Rome", "é", ".", ","]
PIECES = ["▁", "▁▁", *(f"▁{word}" for word in WORDS), *WORDS, *'{}[]":0123456789']
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
STRIP = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "strip": [*STRIP, decoders.Strip(" ", 1, 0)],  # as Llama 2's, Mistral's and Phi-3's
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],  # as T5's
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
PROMPTS: list[Any] = ["the a", "", "the ", "é", "日本", [1] * 20, "yes</s>", "ab" * 20]


def make_tokenizer(kind: str) -> Any:
    vocab = [(piece, -1.0) for piece in ["<unk>", "<s>", "</s>", *BYTES, *PIECES]]
    tokenizer = Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(DECODERS[kind])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, **special
    )


@pytest.fixture(scope="module", params=DECODERS, name="path")
def path_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer(request.param)
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, "llama", vocab_size=len(tokenizer), eos_token_id=2)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module", name="llm")
def llm_fixture(path: Path) -> Any:
    with LLM(path, **SMALL) as llm:
        yield llm


def added(path: Path, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """Text that the completion adds, by transformers, from all tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    before, whole = (tokenizer.decode(t, skip_special_tokens=skip) for t in (prompt, prompt + ids))
    return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071 - strings, not paths


def ids_of(llm: LLM, *pieces: str) -> list[int]:
    return llm.get_tokenizer().convert_tokens_to_ids([*pieces])


def drawn(llm: LLM, seed: int, **options: Any) -> SamplingParams:
    """Texts of pieces, of which bytes would be most."""
    allowed = [*ids_of(llm, *PIECES), 1]
    common = {"ignore_eos": True, "allowed_token_ids": allowed, "seed": seed}
    return SamplingParams(**{"temperature": 2.0, "max_tokens": 9, **common, **options})


@pytest.mark.parametrize("skip", [True, False])
def test_text_of_all_tokens_is_prompt_and_text(skip: bool, path: Path, llm: LLM) -> None:
    params = [drawn(llm, i, n=3, skip_special_tokens=skip) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    texts = [each.text for output in outputs for each in output.outputs]
    assert sum(text.startswith(" ") for text in texts) > 5
    for output in outputs:
        for each in output.outputs:
            assert each.text == added(path, output.prompt_token_ids, each.token_ids, skip)
    streamed = [done[1] for whole in gather(llm.stream(PROMPTS, params)).values() for done in whole]
    assert streamed == texts
    stops = [drawn(llm, i, n=3, skip_special_tokens=skip, stop=["#"]) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, stops, use_tqdm=False)
    assert [each.text for output in outputs for each in output.outputs] == texts


def test_a_continued_message_goes_on_with_its_space(path: Path, llm: LLM) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]
    form = {"add_generation_prompt": False, "continue_final_message": True}
    params = greedy(1, logit_bias={ids_of(llm, "▁yes")[0]: 1000.0})
    [output] = llm.chat(messages, params, use_tqdm=False, **form)
    assert output.prompt is not None and output.prompt.endswith("the")
    assert output["text"] == " yes"


@pytest.mark.parametrize("prompt", ["the", "日"])
def test_a_stop_string_begins_with_the_first_space(prompt: str, llm: LLM) -> None:
    params = greedy(3, logit_bias={ids_of(llm, "▁yes")[0]: 1000.0}, stop=[" y"])
    [output] = llm.generate(prompt, params, use_tqdm=False)
    assert (output["text"], output.outputs[0].stop_reason) == ("", " y")


def test_texts_of_tokens_are_the_text(llm: LLM) -> None:
    """Beside log-probabilities, too, and in OpenAI's columns, where they have offsets."""
    params = drawn(llm, 3, logprobs=0, prompt_logprobs=0, skip_special_tokens=False)
    [output] = llm.generate("the a", params, use_tqdm=False)
    [done] = output.outputs
    items = [next(iter(place.values())) for place in done.logprobs or ()]
    assert "".join(str(item.decoded_token) for item in items) == done.text
    prompt = [next(iter(place.values())) for place in output.prompt_logprobs or () if place]
    assert "".join(str(item.decoded_token) for item in prompt) == " the a"
    bias = {ids_of(llm, piece)[0]: 100.0 for piece in ("▁yes", "no")}
    body = {"prompt": "the", "logprobs": 1, "max_tokens": 4, "logit_bias": bias, "seed": 1}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    [result] = run(llm, read_rows(io.BytesIO(json.dumps(row).encode())))
    [choice] = result.to_dict()["response"]["body"]["choices"]
    columns, text = choice["logprobs"], choice["text"]
    assert "".join(columns["tokens"]) == text and " yes" in text
    places = zip(columns["tokens"], columns["text_offset"], strict=True)
    assert all(text.startswith(token, offset) for token, offset in places)


def test_beams_have_the_text_of_all_tokens(path: Path, llm: LLM) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    [output] = llm.beam_search("the a", BeamSearchParams(3, 4))
    for beam in output.sequences:
        assert beam.text == tokenizer.decode(beam.tokens)


FORMS: list[tuple[dict[str, Any], set[str]]] = [
    ({"choice": [" yes", " no"]}, {" yes", " no"}),
    ({"choice": ["yes", "no"]}, {"yes", "no"}),
    ({"choice": ["  yes", " é."]}, {"  yes", " é."}),
    ({"regex": " (Paris|Rome)"}, {" Paris", " Rome"}),
    (
        {"regex": "( yes)* ?日,"},
        {f"{' yes' * n}{end}" for n in range(20) for end in ("日,", " 日,")},
    ),
    ({"json": {"enum": [" a", 12]}}, {'" a"', "12"}),
    ({"grammar": 'start: " " ("a" | "b")'}, {" a", " b"}),
]


@pytest.mark.parametrize("by", ["generate", "stream"])
@pytest.mark.parametrize(("form", "texts"), FORMS)
def test_structured_outputs_have_their_form(
    form: dict[str, Any], texts: set[str], by: str, llm: LLM
) -> None:
    """Also where no text is before them, and the first space of all others is left out."""
    pytest.importorskip("llguidance")
    own = StructuredOutputsParams(**form)
    options = {"structured_outputs": own, "n": 2, "max_tokens": 60, "logit_bias": {2: 2.0}}
    params = [SamplingParams(2.0, seed=i, **options) for i in range(len(PROMPTS))]
    if by == "generate":
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found = [each.text for output in outputs for each in output.outputs]
    else:
        wholes = gather(llm.stream(PROMPTS, params)).values()
        found = [done[1] for whole in wholes for done in whole]
    assert set(found) <= texts
    assert len(found) == 2 * len(PROMPTS) and len(set(found)) > 1


def test_a_lone_metaspace_decoder_is_taken_for_what_it_is() -> None:
    """And the tokenizer stays as it is."""
    pytest.importorskip("llguidance")
    tokenizer = make_tokenizer("metaspace")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    grammar = GrammarCompiler(tokenizer, len(tokenizer), [2]).compile(
        StructuredOutputsParams(choice=[" yes"])
    )
    assert grammar._matcher.validate_tokens(tokenizer.convert_tokens_to_ids(["▁yes"])) == 1
    assert "Metaspace" in str(tokenizer.backend_tokenizer.decoder)


@pytest.fixture
def said(llm: LLM) -> tuple[list[SamplingParams], list[str]]:
    """Parameters for the prompts, one of which has a form, and the texts of an engine."""
    form = StructuredOutputsParams(choice=[" yes", " no"])
    params = [drawn(llm, i) for i in range(len(PROMPTS))]
    params[1] = SamplingParams(2.0, 9, seed=1, structured_outputs=form)
    texts = [output["text"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert texts[1] in (" yes", " no")
    return params, texts


def test_coroutines_say_the_same(path: Path, said: tuple[list[SamplingParams], list[str]]) -> None:
    params, wanted = said

    async def each() -> list[str]:
        async with AsyncLLM(path, **SMALL) as engine:
            texts = []
            for prompt, own in zip(PROMPTS, params, strict=True):
                stream = engine.stream(prompt, own)
                texts.append("".join([output.outputs[0].text async for output in stream]))
            return texts

    assert asyncio.run(each()) == wanted


@pytest.mark.slow  # the replicas of other tests say what one engine says
@pytest.mark.skipif(sys.platform != "linux", reason="replicas are tried on Linux only")
@pytest.mark.parametrize("path", ["metaspace"], indirect=True)
def test_replicas_say_the_same(path: Path, said: tuple[list[SamplingParams], list[str]]) -> None:
    params, wanted = said
    with LLM(path, **SMALL, data_parallel_size=2) as other:
        assert [o["text"] for o in other.generate(PROMPTS, params, use_tqdm=False)] == wanted
        streamed = gather(other.stream(PROMPTS, params))
        assert [streamed[i][0][1] for i in sorted(streamed)] == wanted
