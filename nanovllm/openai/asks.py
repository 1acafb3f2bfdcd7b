"""What the body of a request asks for, read and checked before anything is queued.

Fields are those of OpenAI's API and of vLLM's extensions to it; one that asks for anything else is
refused by its name. Sampling, forms and conversations are read as those of batch files
(`nanovllm.batch.openai_api`).
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.batch.openai_api import CHAT, COMPLETIONS, read_body
from nanovllm.openai.calls import (
    OPEN_THOUGHT,
    THINK_END,
    calls_form,
    cut_calls_as_text,
    reasoning_rule,
    with_reasoning,
)
from nanovllm.requests.inputs import encode
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import check_bool, check_int
from nanovllm.utils.options import Foreign, only

MAX_PROMPTS, MAX_N, MAX_STOPS = 2048, 128, 64  # of a request
MAX_WORDS = 1024  # that may not come
MAX_IDS = 1 << 18  # of tokens in a field
MAX_LOGPROBS = 1 << 22  # of all tokens together
MAX_TOKENS = 16  # of a completion that says nothing, as OpenAI's
MAX_FORM = 1 << 16  # characters of a schema or a grammar
MAX_REGEX = 1 << 14  # of a regular expression, which may take the square of its length
REFUSED: Foreign = {
    "cache_salt": (only(None), "all requests share the prefix cache"),
    "chat_template": (only(None), "the template is the server's: pass chat_template_kwargs"),
    "documents": (only(None, []), "put them into the messages"),
    "guided_choice": (only(None), "pass structured_outputs"),
    "guided_grammar": (only(None), "pass structured_outputs"),
    "guided_json": (only(None), "pass structured_outputs"),
    "guided_regex": (only(None), "pass structured_outputs"),
    "priority": (only(None, 0), "requests are served as they come"),
    "thinking_token_budget": (only(None), "pass max_tokens"),
    "vllm_xargs": (only(None, {}), "there are no other parameters"),
}


@dataclass
class Ask:
    """What a request asks for.

    Attributes:
        prompts: prompts for `AsyncLLM.stream`.
        params: sampling parameters of all of them.
        is_chat: whether the answer is that of a chat.
        streams: whether the answer comes in pieces.
        interval: tokens that make a piece, see `AsyncLLM.stream`.
        has_usage: whether a stream ends with the usage.
        all_usage: whether each of its pieces has the usage.
        echo: whether completions begin with their prompts.
        most: number of most likely tokens that a chat shows at each place; None: labels.
        as_ids: whether tokens of log-probabilities are shown by their ids.
        has_ids: whether choices have their token ids.
        may_reason: whether the text may begin with reasoning.
        is_reasoning: whether the prompt has opened reasoning.
        shows_reasoning: whether the reasoning is part of the answer.
        may_call: whether calls of tools are looked for.
        most_calls: number of calls that are kept; None: all.
        drops_tokens: whether nothing was to be generated; then one token is, and is dropped.
    """

    prompts: list[Any]
    params: SamplingParams
    is_chat: bool
    streams: bool = False
    interval: int = 1
    has_usage: bool = False
    all_usage: bool = False
    echo: bool = False
    most: int | None = 0
    as_ids: bool = False
    has_ids: bool = False
    may_reason: bool = False
    is_reasoning: bool = False
    shows_reasoning: bool = True
    may_call: bool = False
    most_calls: int | None = None
    drops_tokens: bool = False


async def read_ask(
    llm: AsyncLLM, tokenizer: Any, body: dict[str, Any], *, is_chat: bool, interval: int
) -> Ask:
    """Read a body, of which the fields are taken.

    Args:
        llm: engine.
        tokenizer: its tokenizer, if it has one.
        body: fields of the body.
        is_chat: whether it is that of a chat.
        interval: tokens that make a piece of a stream, if the body does not say it.

    Raises:
        TypeError, ValueError: naming the field that is wrong.
    """
    refuse(body, REFUSED)
    ask = Ask([], llm.get_default_sampling_params(), is_chat, interval=interval)
    ask.streams = take_bool(body, "stream")
    ask.interval = take_int(body, "stream_interval", 1) or interval
    _read_stream_options(ask, body.pop("stream_options", None))
    ask.as_ids = take_bool(body, "return_tokens_as_token_ids")
    ask.has_ids = take_bool(body, "return_token_ids")
    length = take_int(body, "truncate_prompt_tokens", 1)
    if is_chat:
        await _read_chat(llm, tokenizer, body, ask)
    else:
        await _read_completion(tokenizer, body, ask)
    _check_bounds(ask, llm.max_model_len)
    if length is not None:
        for prompt in ask.prompts:
            if len(prompt["prompt_token_ids"]) > length:
                prompt |= {"prompt": None, "prompt_token_ids": prompt["prompt_token_ids"][-length:]}
    return ask


def refuse(body: dict[str, Any], refused: Foreign) -> None:
    """Take the fields that ask for nothing off a body, and refuse those that do."""
    for name, (is_nothing, remedy) in refused.items():
        if name in body and not is_nothing(value := body.pop(name)):
            raise ValueError(f"`{name}` {value!r} is not supported: {remedy}")


def take_bool(body: dict[str, Any], name: str, default: bool = False) -> bool:
    """Take a field that is true or false off a body."""
    value = body.pop(name, None)
    value = default if value is None else value
    check_bool(name, value)
    return value


def take_int(body: dict[str, Any], name: str, minimum: int) -> int | None:
    """Take an integer off a body; None if there is none."""
    value = body.pop(name, None)
    if value is not None:
        check_int(name, value, minimum)
    return value


async def encode_prompts(
    tokenizer: Any, given: Any, name: str, *, add_special_tokens: bool = True
) -> list[dict[str, Any]]:
    """One text or list of token ids, or a list of those, as prompts. Texts are tokenised in another
    thread.
    """
    items = given if isinstance(given, list) else [given]
    if not items or isinstance(items[0], int):
        items = [given]
    if len(items) > MAX_PROMPTS:
        raise ValueError(f"`{name}` must hold at most {MAX_PROMPTS} prompts, got {len(items)}")
    if tokenizer is None and any(isinstance(item, str) for item in items):
        raise ValueError(f"`{name}` must hold token ids for a model without tokenizer, got text")
    for item in items:
        if not isinstance(item, (str, list)):
            raise TypeError(f"`{name}` must hold texts or lists of token ids, got {item!r}")

    def encode_all() -> list[dict[str, Any]]:
        found = []
        for item in items:
            text = item if isinstance(item, str) else None
            ids = item
            if text is not None:
                ids = encode(tokenizer, text, name, add_special_tokens=add_special_tokens)
            found.append({"prompt": text, "prompt_token_ids": ids})
        return found

    return await asyncio.to_thread(encode_all)


def _read_stream_options(ask: Ask, options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"`stream_options` must be an object, got {options!r}")
    if not ask.streams:
        raise ValueError(f"`stream_options` must be null without `stream`, got {options!r}")
    given = dict(options)
    ask.has_usage = take_bool(given, "include_usage")
    ask.all_usage = take_bool(given, "continuous_usage_stats")
    take_bool(given, "include_obfuscation")  # against observers of a network: there is none
    if given:
        raise ValueError(f"`stream_options.{min(given)}` is not supported: leave it out")


async def _read_completion(tokenizer: Any, body: dict[str, Any], ask: Ask) -> None:
    ask.echo = take_bool(body, "echo")
    adds = take_bool(body, "add_special_tokens", True)
    if "prompt" not in body or body["prompt"] is None:
        raise ValueError("`prompt` must be given, got none")
    ask.prompts = await encode_prompts(
        tokenizer, body.pop("prompt"), "prompt", add_special_tokens=adds
    )
    if ask.echo and body.get("max_tokens") == 0:
        body["max_tokens"], ask.drops_tokens = 1, True
    default = replace(ask.params, max_tokens=MAX_TOKENS)
    params = read_body({**body, "prompt": [0]}, COMPLETIONS, default, where="").params
    if ask.echo and params.logprobs is not None:
        params = replace(params, prompt_logprobs=params.logprobs)
    elif ask.streams and params.prompt_logprobs is not None:
        raise ValueError("`prompt_logprobs` must be null with `stream`: pass echo and logprobs")
    ask.params = params


async def _read_chat(llm: AsyncLLM, tokenizer: Any, body: dict[str, Any], ask: Ask) -> None:
    """Read a chat. Its messages are rendered, and the images of hosts in them fetched, in another
    thread. Which images they may name is for the engine's options.
    """
    ask.shows_reasoning = take_bool(body, "include_reasoning", True)
    effort, several = (
        body.pop("reasoning_effort", None),
        take_bool(body, "parallel_tool_calls", True),
    )
    tools, choice = body.pop("tools", None), body.pop("tool_choice", None)
    check_tools(tools)
    own = read_body(body, CHAT, replace(ask.params, max_tokens=None), where="")
    ask.params, ask.most = own.params, own.params.logprobs
    if own.params.logprob_token_ids is not None:
        ask.most = None
    if ask.streams and own.params.prompt_logprobs is not None:
        raise ValueError("`prompt_logprobs` must be null with `stream`")
    options = dict(own.chat)
    if effort is not None:
        given = options.get("chat_template_kwargs", {})
        if isinstance(given, dict):  # else it is refused
            options["chat_template_kwargs"] = {"reasoning_effort": effort, **given}
    shown = None if choice == "none" else tools or None
    messages: Any = own.messages
    if isinstance(messages, list):  # else it is refused
        messages = cut_calls_as_text(messages)
    prompt = await llm.render(messages, tools=shown, **options)
    ask.prompts = [prompt]
    thinks = ""
    if THINK_END in str(getattr(tokenizer, "chat_template", "")):
        thinks = reasoning_rule(prompt["prompt"])
        ask.may_reason, ask.is_reasoning = bool(thinks), thinks == OPEN_THOUGHT
    ask.may_call = shown is not None
    ask.most_calls = None if several else 1
    called = called_tools(tools or [], choice)
    form = ask.params.structured_outputs
    if called:
        if form is not None:
            raise ValueError(
                f"`tool_choice` must be none or auto beside a form of the answer, got {choice!r}"
            )
        lark = calls_form(called, several=several and choice == "required", thinks=thinks)
        ask.params = replace(ask.params, structured_outputs=StructuredOutputsParams(grammar=lark))
    elif thinks and form is not None and (form.json or form.json_object):
        lark = with_reasoning(str(form.json or json.dumps({"type": "object"})), thinks)
        ask.params = replace(ask.params, structured_outputs=StructuredOutputsParams(grammar=lark))


def check_tools(tools: Any) -> None:
    """Raise unless these are OpenAI's tools, or None."""
    if tools is None:
        return
    if not isinstance(tools, list):
        raise TypeError(f"`tools` must be a list of tools, got {tools!r}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise ValueError(
                f'`tools[{i}]` must be {{"type": "function", "function": ...}}, got {tool!r}'
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(
                f"`tools[{i}].function.name` must be a name, got {function.get('name')!r}"
            )
        if not isinstance(function.get("parameters"), (dict, type(None))):
            raise TypeError(
                f"`tools[{i}].function.parameters` must be a JSON Schema, "
                f"got {function['parameters']!r}"
            )


def called_tools(tools: Sequence[Any], choice: Any) -> list[Any]:
    """The tools of which one must be called: all, a named one, or none."""
    if choice in (None, "none", "auto"):
        return []
    if choice == "required":
        if not tools:
            raise ValueError("`tools` must be given with `tool_choice` required, got none")
        return list(tools)
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if name is None:
        raise ValueError(
            "`tool_choice` must be none, auto, required or "
            f'{{"type": "function", "function": {{"name": ...}}}}, got {choice!r}'
        )
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise ValueError(f"`tool_choice` must name one of the tools, got {name!r}")
    return found[:1]


def _check_bounds(ask: Ask, max_model_len: int) -> None:
    params = ask.params
    _check_lists(params)
    if params.n > MAX_N or params.n * len(ask.prompts) > MAX_PROMPTS:
        raise ValueError(
            f"`n` must be at most {MAX_N}, and at most {MAX_PROMPTS} for all prompts together, "
            f"got {params.n} for {len(ask.prompts)}"
        )
    count = -1 if params.logprobs is None else params.logprobs
    count = max(count, len(params.logprob_token_ids or ()) - 1) + 1
    tokens = min(params.max_tokens or max_model_len, max_model_len)
    if (total := len(ask.prompts) * params.n * tokens * count) > MAX_LOGPROBS:
        raise ValueError(
            f"`logprobs` must be at most {MAX_LOGPROBS:,} for all tokens of all choices, "
            f"got {total:,}: lower max_tokens, n or their number"
        )
    if (form := params.structured_outputs) is not None:
        most = MAX_FORM if form.regex is None else MAX_REGEX
        text = form.json or form.regex or form.grammar or ""
        size = len(text) if isinstance(text, str) else 0
        if size > most:
            raise ValueError(
                f"`structured_outputs` must have at most {most:,} characters, got {size:,}"
            )


def _check_lists(params: SamplingParams) -> None:
    most = {
        "stop": (MAX_STOPS, "strings"),
        "bad_words": (MAX_WORDS, "strings"),
        "stop_token_ids": (MAX_IDS, "token ids"),
        "allowed_token_ids": (MAX_IDS, "token ids"),
        "logit_bias": (MAX_IDS, "token ids"),
    }
    for name, (bound, kind) in most.items():
        given = getattr(params, name) or ()
        if len(given) > bound:
            raise ValueError(f"`{name}` must hold at most {bound} {kind}, got {len(given)}")
