"""Ends of completions: stop strings and tokens, end-of-sequence tokens, lengths, `min_tokens`.

The tokens are scripted, and what must come out is written down or follows from a naive search. The
tokenizer's tokens are the bytes of UTF-8; 258 ends a text.
"""

import random
import re

import pytest

from checkpoints import SMALL, TINY, assert_idle, facts, gather, greedy, play
from nanovllm import LLM, SamplingParams

EOS, OTHER_EOS, SPECIAL = 258, 256, 257


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "overlap"])
def llm(request):
    with LLM(TINY, overlap=request.param, **SMALL) as llm:
        yield llm


def said(*parts):
    """Texts and tokens as tokens."""
    return [
        token for part in parts for token in ([part] if isinstance(part, int) else _bytes(part))
    ]


def _bytes(part):
    return list(part if isinstance(part, bytes) else part.encode())


CASES = {
    # what the model says, the parameters, the text, how many tokens, and the reasons
    "across tokens": (["hello world"], {"stop": "lo w"}, "hel", 7, "stop", "lo w"),
    "first token": (["xyz"], {"stop": ["x"]}, "", 1, "stop", "x"),
    "whole text": (["stop"], {"stop": ["stop"]}, "", 4, "stop", "stop"),
    "false start": (["ababac"], {"stop": ["abac"]}, "ab", 6, "stop", "abac"),
    "character": (["né!"], {"stop": ["é"]}, "n", 3, "stop", "é"),
    "characters": (["ü日本語"], {"stop": ["日本"]}, "ü", 8, "stop", "日本"),
    "a byte shared": (["êé"], {"stop": ["é"]}, "ê", 4, "stop", "é"),
    "wrong bytes": (["a", b"\xc3", "(b"], {"stop": ["\ufffd("]}, "a", 3, "stop", "\ufffd("),
    "longest of several": (["abcd"], {"stop": ["cd", "bcd", "d"]}, "a", 4, "stop", "bcd"),
    "first of several": (["abcd"], {"stop": ["bcd", "bc"]}, "a", 3, "stop", "bc"),
    "over special": (["a", SPECIAL, "b"], {"stop": ["ab"]}, "", 3, "stop", "ab"),
    "EOS": (["hi", EOS], {"stop": ["!"]}, "hi", 3, "stop", None),
    "other EOS": (["hi", OTHER_EOS], {}, "hi", 3, "stop", None),
    "EOS first": ([EOS], {"stop": ["a"]}, "", 1, "stop", None),
    "EOS within a stop string": (["ab", EOS], {"stop": ["abc"]}, "ab", 3, "stop", None),
    "EOS within a character": (["a", b"\xc3", EOS], {"stop": ["x"]}, "a\ufffd", 3, "stop", None),
    "EOS as stop token": (["hi", EOS], {"stop_token_ids": [EOS]}, "hi", 3, "stop", None),
    "ignored EOS as stop token": (
        ["hi", EOS],
        {"stop_token_ids": [EOS], "ignore_eos": True},
        *("hi", 3, "stop", EOS),
    ),
    "ignored EOS": (
        ["h", EOS, "i"],
        {"ignore_eos": True, "max_tokens": 3},
        "hi",
        3,
        "length",
        None,
    ),
    "stop token": (["hi!"], {"stop_token_ids": [5, ord("!")]}, "hi", 3, "stop", ord("!")),
    "stop token, text on the way": (
        ["hi!"],
        {"stop_token_ids": [ord("!")], "stop": ["?"]},
        *("hi", 3, "stop", ord("!")),
    ),
    "stop token is stop string": (
        ["hi!"],
        {"stop_token_ids": [ord("!")], "stop": ["!"]},
        *("hi", 3, "stop", ord("!")),
    ),
    "special text as stop string": (
        ["hi", EOS],
        {"stop": ["<|im_end|>"], "ignore_eos": True, "skip_special_tokens": False},
        *("hi", 3, "stop", "<|im_end|>"),
    ),
    "special token": (
        ["hi", SPECIAL, "!"],
        {"stop": ["!", "<|im_start|>"]},
        *("hi", 3, "stop", "<|im_start|>"),
    ),
    "special token, spelled": (
        ["hi<|im_start|>"],
        {"stop": ["<|im_start|>"]},
        *("hi", 14, "stop", "<|im_start|>"),
    ),
    "special token within a character": (
        ["a", b"\xc3", SPECIAL],
        {"stop": ["<|im_start|>"]},
        *("a\ufffd", 3, "stop", "<|im_start|>"),
    ),
    "special token before min_tokens": (
        [SPECIAL, "a", SPECIAL, "b", SPECIAL],
        {"stop": ["<|im_start|>"], "min_tokens": 3},
        *("ab", 5, "stop", "<|im_start|>"),
    ),
    "special token after the beginning of a stop string": (
        ["ab", SPECIAL],
        {"stop": ["abc", "<|im_start|>"]},
        *("ab", 3, "stop", "<|im_start|>"),
    ),
    "special token that is shown": (
        ["hi", SPECIAL, "user", SPECIAL],
        {"stop": ["i<|im_start|>us"], "skip_special_tokens": False},
        *("h", 5, "stop", "i<|im_start|>us"),
    ),
    "ignored EOS as stop string": (
        ["hi", EOS],
        {"stop": ["<|im_end|>"], "ignore_eos": True},
        *("hi", 3, "stop", "<|im_end|>"),
    ),
    "EOS is stop string": (
        ["hi", EOS],
        {"stop": ["<|im_end|>"], "skip_special_tokens": False},
        *("hi", 3, "stop", None),
    ),
    "length": (["abcd"], {"max_tokens": 3, "stop": ["x"]}, "abc", 3, "length", None),
    "length within a stop string": (
        ["abc"],
        {"max_tokens": 2, "stop": ["abc"]},
        *("ab", 2, "length", None),
    ),
    "length within a character": (
        ["a日"],
        {"max_tokens": 3, "stop": ["日"]},
        *("a\ufffd", 3, "length", None),
    ),
    "stop at max_tokens": (["abc"], {"max_tokens": 3, "stop": ["c"]}, "ab", 3, "stop", "c"),
    "EOS at max_tokens": (["ab", EOS], {"max_tokens": 3}, "ab", 3, "stop", None),
    "stop token at max_tokens": (
        ["abc"],
        {"max_tokens": 3, "stop_token_ids": [ord("c")]},
        *("ab", 3, "stop", ord("c")),
    ),
    "min_tokens": (["abcab"], {"min_tokens": 4, "stop": ["b"]}, "abca", 5, "stop", "b"),
    "min_tokens, just too late": (
        ["abcab"],
        {"min_tokens": 5, "stop": ["b"], "max_tokens": 7},
        *("abcab##", 7, "length", None),
    ),
    "begun before min_tokens": (["aXYb"], {"min_tokens": 2, "stop": ["XY"]}, "a", 3, "stop", "XY"),
    "stop token before min_tokens": (
        ["a!b!c"],
        {"min_tokens": 3, "stop_token_ids": [ord("!")]},
        *("a!b", 4, "stop", ord("!")),
    ),
    "EOS before min_tokens": (["a", EOS, "b", EOS], {"min_tokens": 3}, "ab", 4, "stop", None),
    "all before min_tokens": (
        ["!", EOS, "x!!"],
        {"min_tokens": 4, "stop_token_ids": [EOS, ord("x")], "stop": ["x", "!"]},
        *("!x!", 5, "stop", "!"),
    ),
    "no text": (["hi", EOS], {"detokenize": False}, "", 3, "stop", None),
}
INCLUDED = {  # the same with the stop string in the output
    "across tokens": "hello w",
    "first token": "x",
    "false start": "ababac",
    "characters": "ü日本",
    "longest of several": "abcd",
    "over special": "ab",
    "EOS": "hi",
    "stop token": "hi!",
    "stop token, text on the way": "hi!",
    "stop token is stop string": "hi!",
    "special token": "hi",
    "special token, spelled": "hi<|im_start|>",
    "special token within a character": "a\ufffd",
    "special token that is shown": "hi<|im_start|>us",
    "EOS is stop string": "hi<|im_end|>",
    "special text as stop string": "hi<|im_end|>",
    "length within a stop string": "ab",
    "stop at max_tokens": "abc",
    "stop token at max_tokens": "abc",
    "min_tokens": "abcab",
    "stop token before min_tokens": "a!b!",
    "all before min_tokens": "!x!!",
    "no text": "",
}


@pytest.mark.parametrize("by", ["generate", "stream"])
@pytest.mark.parametrize(
    ("name", "include"), [(name, False) for name in CASES] + [(name, True) for name in INCLUDED]
)
def test_cases(name, include, by, llm, monkeypatch):
    parts, options, text, count, *reasons = CASES[name]
    text = INCLUDED[name] if include else text
    params = greedy(**{"max_tokens": 20, "include_stop_str_in_output": include, **options})
    play(monkeypatch, llm, [said(*parts)])
    whole = (0, text, [*said(*parts), *b"#" * 9][:count], *reasons, None)
    if by == "generate":
        [output] = llm.generate("a", params, use_tqdm=False)
        assert [facts(done) for done in output.outputs] == [whole]
    else:
        assert list(gather(llm.stream("a", params)).values()) == [[whole]]
    assert_idle(llm)


@pytest.mark.parametrize("stop", ["<|im_start|>user", "\n<|im_start|>", "a<|im_end|>b"])
def test_a_stop_string_that_no_text_can_have_is_refused(stop, llm):
    """A special token is left out of the text; shown, it can be part of one (`CASES`)."""
    special = "<|im_start|>" if "start" in stop else "<|im_end|>"
    remedy = rf"stop_token_ids=\[{SPECIAL if 'start' in stop else EOS}\], or skip_special_tokens"
    for call in (llm.generate, llm.stream, llm.add_request):
        with pytest.raises(ValueError, match=rf"^`\S+stop` must .*{re.escape(special)}.*{remedy}"):
            call("a", greedy(9, stop=["x", stop]))
    assert_idle(llm)


def test_order_of_stop_strings_does_not_matter(llm, monkeypatch):
    stops = ["cd", "bcd", "d", "abcde"]
    for _ in range(5):
        random.shuffle(stops)
        with monkeypatch.context() as patch:
            play(patch, llm, [said("xabcde")])
            [output] = llm.generate("a", greedy(9, stop=stops), use_tqdm=False)
        assert (output["text"], output.outputs[0].stop_reason) == ("xa", "bcd")


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_end_of_the_context(reason, llm, monkeypatch):
    """A stop string that is complete with the last token for which there is room."""
    stop = "<" if reason == "stop" else "<!"
    script = said("." * 27, "<!")
    play(monkeypatch, llm, [script])
    [output] = llm.generate([9] * 100, greedy(None, stop=[stop]), use_tqdm=False)
    assert output["token_ids"] == script[:28]
    assert output["text"] == "." * 27 + ("" if reason == "stop" else "<")
    assert output.outputs[0].finish_reason == reason


def test_completions_end_each_at_its_own(llm, monkeypatch):
    scripts = [said("abcX..."), said("X"), said("ab", EOS, "cX"), said("abcdefgh")]
    expected = [
        (0, "abc", scripts[0][:4], "stop", "X", None),
        (1, "", scripts[1], "stop", "X", None),
        (2, "ab", scripts[2][:3], "stop", None, None),
        (3, "abcdef", scripts[3][:6], "length", None, None),
    ]
    params = SamplingParams(n=4, max_tokens=6, stop=["X"])
    with monkeypatch.context() as patch:
        play(patch, llm, scripts)
        [output] = llm.generate("a", params, use_tqdm=False)
        assert [facts(done) for done in output.outputs] == expected
    play(monkeypatch, llm, scripts)
    assert list(gather(llm.stream("a", params)).values()) == [expected]
    assert_idle(llm)


def test_superfluous_token_is_dropped(llm, monkeypatch):
    """With overlap the step after the stop string is under way when it is found."""
    before = llm.metrics()["num_steps"]
    play(monkeypatch, llm, [said("abXcX")])
    run, launches = llm.executor.run, []
    monkeypatch.setattr(llm.executor, "run", lambda *args: launches.append(args) or run(*args))
    [output] = llm.generate("a", greedy(20, stop=["bX"]), use_tqdm=False)
    assert facts(output.outputs[0]) == (0, "a", said("abX"), "stop", "bX", None)
    in_vain = len(launches) - (llm.metrics()["num_steps"] - before)
    assert in_vain == (1 if llm.metrics()["overlap"] else 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_preemption_changes_nothing(overlap, monkeypatch):
    prompts = [[i + 1] * 17 for i in range(4)]
    scripts = [said("é" * (10 + i), "<s", "t<sto", "p>!") for i in range(4)]
    texts = ["é" * (10 + i) + "<st" for i in range(4)]
    params = greedy(60, stop=["<stop>"])
    with LLM(TINY, overlap=overlap, **{**SMALL, "num_kvcache_blocks": 8}) as llm:
        # as if every request ended soon, so that too many are admitted
        monkeypatch.setattr(llm.scheduler.lengths, "remaining", lambda seq: 1)
        play(monkeypatch, llm, scripts * 2)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.metrics()["num_preemptions"]
        streamed = gather(llm.stream(prompts, params))
        assert 0 < preemptions < llm.metrics()["num_preemptions"]
        expected = [
            [(0, text, script[:-1], "stop", "<stop>", None)]
            for text, script in zip(texts, scripts, strict=True)
        ]
        assert [[facts(o.outputs[0])] for o in outputs] == expected
        assert [streamed[i] for i in sorted(streamed)] == expected
        assert_idle(llm)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_hold_in_the_model(ignore_eos, llm):
    """Not scripted: what ends the text is by far the most likely, and not drawn too early."""
    end = ord("!") if ignore_eos else EOS
    biases = {ord("!"): 900.0} if ignore_eos else {EOS: 1000.0, OTHER_EOS: 950.0, ord("!"): 900.0}
    params = greedy(
        20, min_tokens=5, stop_token_ids=[ord("!")], ignore_eos=ignore_eos, logit_bias=biases
    )
    [output] = llm.generate("a", params, use_tqdm=False)
    *early, last = output["token_ids"]
    assert len(early) == 5 and not set(biases) & set(early)
    assert last == end
    assert output.outputs[0].stop_reason == (end if ignore_eos else None)


# -- a naive search as the oracle -----------------------------------------------------------------


def naive(script, params):
    """Text, number of tokens and stop string; and the text that is certain after each token."""
    certain = []
    before = ""
    for count in range(1, params.max_tokens + 1):
        text = bytes(script[:count]).decode(errors="ignore")
        ends = [
            (text.index(stop, max(len(before) - len(stop) + 1, 0)), stop)
            for stop in params.stop
            if text != before and text.endswith(stop) and count > params.min_tokens
        ]
        if ends:
            begin, stop = min(ends)
            end = begin + len(stop) if params.include_stop_str_in_output else begin
            return text[:end], count, stop, certain
        before = text
        held = [
            size
            for stop in params.stop
            for size in range(1, len(stop))
            if text.endswith(stop[:size]) and not params.include_stop_str_in_output
        ]
        certain.append(text[: len(text) - max(held, default=0)])
    return bytes(script[: params.max_tokens]).decode(errors="replace"), count, None, certain


def random_case(rng):
    alphabet = rng.choice(["ab", "aé", "é日x", "😀ab"])
    text = "".join(rng.choices(alphabet, k=20))
    lengths = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    stops = ["".join(rng.choices(alphabet, k=length)) for length in lengths]
    max_tokens = rng.randint(1, 20)
    params = greedy(
        max_tokens,
        stop=stops,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        include_stop_str_in_output=rng.random() < 0.3,
    )
    return list(text.encode()), params


def test_random_texts_end_where_a_naive_search_says(llm, monkeypatch):
    rng = random.Random(0)
    scripts, params = map(list, zip(*(random_case(rng) for _ in range(150)), strict=True))
    prompts = [[7]] * len(scripts)
    with monkeypatch.context() as patch:
        play(patch, llm, scripts)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    play(monkeypatch, llm, scripts)
    pieces = {}
    for output in llm.stream(prompts, params):
        pieces.setdefault(output.request_id, []).append(output.outputs[0].text)
    found = 0
    for case, output in enumerate(outputs):
        text, count, stop, certain = naive(scripts[case], params[case])
        reasons = ("length", None) if stop is None else ("stop", stop)
        whole = (0, text, scripts[case][:count], *reasons, None)
        assert facts(output.outputs[0]) == whole, (scripts[case], params[case])
        news = pieces[sorted(pieces)[case]]
        assert "".join(news) == text
        so_far = ["".join(news[: i + 1]) for i in range(len(news) - 1)]
        assert so_far == certain[: count - 1], (scripts[case], params[case])
        found += stop is not None
    assert 50 < found < 140
