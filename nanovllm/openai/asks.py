"""`Ask`: a request to the server, read and checked before anything is queued.

Fields are those that `bodies` reads for files of batches, too, and these: how the answer comes,
which tools must be called, and how a prompt is tokenised.
"""

import asyncio
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from nanovllm.openai.bodies import (
    CHAT,
    COMPLETIONS,
    Fields,
    named_as_sent,
    read_chat,
    read_sampling,
)
from nanovllm.openai.calls import THINK_END
from nanovllm.openai.tools import (
    OPEN_THOUGHT,
    answer_form,
    called_tools,
    calls_form,
    check_tools,
    cut_calls_as_text,
    reasoning_rule,
    special_tags,
)
from nanovllm.requests.inputs import encode
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import shown
from nanovllm.utils.options import Foreign, only

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM

MAX_PROMPTS = 2048  # of a request, and choices of all of them
MAX_N = 128
MAX_LOGPROBS = 1 << 20  # of all tokens of an answer, which takes the event loop seconds to write
MAX_IDS = 1 << 18  # of tokens in a field
MAX_ITEMS = {
    "stop": (64, "strings"),
    "bad_words": (1024, "strings"),
    "stop_token_ids": (MAX_IDS, "token ids"),
    "allowed_token_ids": (MAX_IDS, "token ids"),
    "logit_bias": (MAX_IDS, "token ids"),
}
MAX_FORM = 1 << 16  # characters of a schema or a grammar
MAX_REGEX = 1 << 12  # of a regular expression, which may take the square of its length
# Bound on the sum of the numbers in `multipleOf`, as on the number of a form's states; or on their
# least common multiple, where several may hold for one value.
MAX_MULTIPLE = 100_000
TOGETHER = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref|\$dynamicRef)"')  # in schemas of which they may
MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([0-9][0-9.eE+-]*)')
ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
REGEX = re.compile(r"/(?:\\.|[^/\\\n])+/")  # in a grammar
DEFAULT_TOKENS = 16  # of a completion that says nothing, as OpenAI's
BY_TEMPLATE: Foreign = {
    "add_special_tokens": (only(None, False), "the chat template writes them"),
}


@dataclass(frozen=True)
class Ask:
    """A request, as it was read.

    Attributes:
        prompts: prompts for `AsyncLLM.stream`.
        params: sampling parameters of all of them.
        is_chat: whether the answer is that of a chat.
        streams: whether the answer comes in pieces.
        interval: tokens that make a piece, see `AsyncLLM.stream`.
        has_usage: whether a stream ends with the usage.
        all_usage: whether each of its pieces has the usage.
        as_ids: whether tokens of log-probabilities are shown by their ids.
        has_ids: whether choices have their token ids.
        echo: whether completions begin with their prompts.
        drops_tokens: whether nothing was to be generated; then one token is, and is dropped.
        may_reason: whether the text of a chat may begin with reasoning.
        is_reasoning: whether the prompt has opened reasoning.
        shows_reasoning: whether the reasoning is part of the answer.
        may_call: whether calls of tools are looked for.
        may_call_again: whether there may be more calls than one.
    """

    prompts: list[dict[str, Any]]
    params: SamplingParams
    is_chat: bool
    streams: bool = False
    interval: int = 1
    has_usage: bool = False
    all_usage: bool = False
    as_ids: bool = False
    has_ids: bool = False
    echo: bool = False
    drops_tokens: bool = False
    may_reason: bool = False
    is_reasoning: bool = False
    shows_reasoning: bool = True
    may_call: bool = False
    may_call_again: bool = True


async def read_ask(llm: "AsyncLLM", fields: Fields, *, is_chat: bool, interval: int) -> Ask:
    """Read the fields of a body.

    Args:
        llm: engine.
        fields: fields of the body, which are taken.
        is_chat: whether it is that of a chat.
        interval: tokens that make a piece of a stream, if the body does not say it.

    Raises:
        TypeError, ValueError: naming the field that is wrong.
    """
    streams = fields.take_bool("stream")
    options = _stream_options(fields, streams)
    ask = Ask(
        prompts=[],
        params=llm.get_default_sampling_params(),
        is_chat=is_chat,
        streams=streams,
        interval=fields.take_int("stream_interval", 1) or interval,
        has_usage=options.take_bool("include_usage"),
        all_usage=options.take_bool("continuous_usage_stats"),
        as_ids=fields.take_bool("return_tokens_as_token_ids"),
        has_ids=fields.take_bool("return_token_ids"),
    )
    options.take_bool("include_obfuscation")  # against observers of a network: there is none
    options.end()
    length = fields.take_int("truncate_prompt_tokens", 1)
    ask = await (_read_chat if is_chat else _read_completion)(llm, fields, ask)
    if length is not None:
        if any("multi_modal_data" in prompt for prompt in ask.prompts):
            raise ValueError(
                f"`truncate_prompt_tokens` must be null beside images, got {length}: it would cut "
                "them, too"
            )
        for prompt in ask.prompts:
            if len(prompt["prompt_token_ids"]) > length:
                prompt |= {"prompt": None, "prompt_token_ids": prompt["prompt_token_ids"][-length:]}
    with named_as_sent(fields.names):
        _check_bounds(ask, llm.max_model_len)
    return ask


def read_messages(llm: "AsyncLLM", fields: Fields) -> tuple[Any, dict[str, Any]]:
    """Take the messages of a chat, and arguments of `AsyncLLM.render`, which checks the rest."""
    if not getattr(llm.tokenizer, "chat_template", None):
        raise ValueError("this model has no chat template: use /v1/completions")
    fields.refuse(BY_TEMPLATE)
    effort = fields.take("reasoning_effort")
    messages, options = read_chat(fields)
    check_tools(options.get("tools", []))
    variables = options.get("chat_template_kwargs", {})
    if effort is not None and isinstance(variables, dict):
        options["chat_template_kwargs"] = {"reasoning_effort": effort, **variables}
    if isinstance(messages, list):
        messages = [cut_calls_as_text(message) for message in messages]
    return messages, options


async def encode_prompts(
    llm: "AsyncLLM", given: Any, name: str, *, add_special_tokens: bool = True
) -> list[dict[str, Any]]:
    """One text or list of token ids, or a list of those, as prompts. Texts are tokenised in one of
    asyncio's threads, of which there are a few, and not at all if they are too long for the model
    in any case.
    """
    items = given if isinstance(given, list) else [given]
    if not items or isinstance(items[0], int):
        items = [given]
    if len(items) > MAX_PROMPTS:
        raise ValueError(f"`{name}` must hold at most {MAX_PROMPTS} prompts, got {len(items)}")
    max_ids = max(MAX_IDS, llm.max_model_len)
    for item in items:
        if not isinstance(item, (str, list)):
            raise TypeError(f"`{name}` must hold texts or lists of token ids, got {shown(item)}")
        if isinstance(item, list) and len(item) > max_ids:
            raise ValueError(
                f"`{name}` must hold at most {max_ids} token ids, got {len(item)}: shorten it"
            )
        if isinstance(item, str) and llm.tokenizer is None:
            raise ValueError(
                f"`{name}` must hold token ids for a model without tokenizer, got text"
            )

    def encode_item(item: str | list[int]) -> dict[str, Any]:
        if isinstance(item, list):
            return {"prompt": None, "prompt_token_ids": item}
        token_ids = encode(
            llm.tokenizer,
            item,
            name,
            max_chars=llm.max_chars,
            add_special_tokens=add_special_tokens,
        )
        return {"prompt": item, "prompt_token_ids": token_ids}

    return await asyncio.to_thread(lambda: [encode_item(item) for item in items])


def _stream_options(fields: Fields, streams: bool) -> Fields:
    """The fields of `stream_options`; none without it."""
    given = fields.take("stream_options")
    if given is None:
        return Fields({})
    if not isinstance(given, dict):
        raise TypeError(f"`stream_options` must be an object, got {shown(given)}")
    if not streams:
        raise ValueError(f"`stream_options` must be null without `stream`, got {shown(given)}")
    return Fields(given, "stream_options.")


async def _read_completion(llm: "AsyncLLM", fields: Fields, ask: Ask) -> Ask:
    echo = fields.take_bool("echo")
    drops_tokens = echo and fields.take_if("max_tokens", 0)
    adds = fields.take_bool("add_special_tokens", True)
    given = fields.take_given("prompt")
    default = replace(ask.params, max_tokens=1 if drops_tokens else DEFAULT_TOKENS)
    params = read_sampling(fields, COMPLETIONS, default)
    if echo and params.logprobs is not None:
        params = replace(params, prompt_logprobs=params.logprobs)
    elif ask.streams and params.prompt_logprobs is not None:
        raise ValueError("`prompt_logprobs` must be null with `stream`: pass echo and logprobs")
    prompts = await encode_prompts(llm, given, "prompt", add_special_tokens=adds)
    return replace(ask, prompts=prompts, params=params, echo=echo, drops_tokens=drops_tokens)


async def _read_chat(llm: "AsyncLLM", fields: Fields, ask: Ask) -> Ask:
    """Read a chat. Its messages are rendered, and the images of hosts in them fetched, in another
    thread. The engine's options say which images they may name.
    """
    shows_reasoning = fields.take_bool("include_reasoning", True)
    several = fields.take_bool("parallel_tool_calls", True)
    choice = fields.take("tool_choice")
    messages, options = read_messages(llm, fields)
    tools = options.pop("tools", None) or []
    called = called_tools(tools, choice)
    params = read_sampling(fields, CHAT, replace(ask.params, max_tokens=None))
    if ask.streams and params.prompt_logprobs is not None:
        raise ValueError("`prompt_logprobs` must be null with `stream`")
    form, may_call = params.structured_outputs, bool(tools) and choice != "none"
    if called and form is not None:
        raise ValueError(
            f"`tool_choice` must be none or auto beside a form of the answer, got {shown(choice)}"
        )
    prompt = await llm.render(messages, tools=tools if may_call else None, **options)

    thinks = ""
    if THINK_END in str(getattr(llm.tokenizer, "chat_template", "")):
        thinks = reasoning_rule(prompt["prompt"], _begun(messages, options))
    if (thinks or may_call) and special_tags(llm.tokenizer):
        params = replace(params, skip_special_tokens=False)
    lark, schema = None, _schema(form)
    if called:
        lark = calls_form(called, several=several and choice == "required", thinks=thinks)
    elif schema is not None and (thinks or may_call):
        lark = answer_form(schema, tools if may_call else [], several=several, thinks=thinks)
    if lark is not None:
        params = replace(params, structured_outputs=StructuredOutputsParams(grammar=lark))
    return replace(
        ask,
        prompts=[prompt],
        params=params,
        may_reason=bool(thinks),
        is_reasoning=thinks == OPEN_THOUGHT,
        shows_reasoning=shows_reasoning,
        may_call=may_call,
        may_call_again=several,
    )


def _begun(messages: Any, options: dict[str, Any]) -> str:
    """The text of the message that the answer continues, if it is one."""
    said = messages[-1].get("content") if options.get("continue_final_message") else None
    return said if isinstance(said, str) else ""


def _schema(form: StructuredOutputsParams | None) -> str | None:
    """The JSON Schema of a form's answers; None: they need not be JSON."""
    if form is not None and form.json_object:
        return json.dumps({"type": "object"})
    return None if form is None or form.json is None else str(form.json)


def _check_bounds(ask: Ask, max_model_len: int) -> None:
    """Raise if an answer might be too large, or a form too large to be compiled."""
    params = ask.params
    if params.return_sampling_mask:  # up to a vocabulary for each token
        raise ValueError(
            "`return_sampling_mask` must be false, got true: the library returns masks"
        )
    for name, (most, kind) in MAX_ITEMS.items():
        given = getattr(params, name) or ()
        if len(given) > most:
            raise ValueError(f"`{name}` must hold at most {most} {kind}, got {len(given)}")
    if params.n > MAX_N or params.n * len(ask.prompts) > MAX_PROMPTS:
        raise ValueError(
            f"`n` must be at most {MAX_N}, and at most {MAX_PROMPTS} for all prompts together, "
            f"got {params.n} for {len(ask.prompts)}"
        )
    _check_logprobs(ask, max_model_len)
    if (form := params.structured_outputs) is not None:
        most = MAX_FORM if form.regex is None else MAX_REGEX
        text = form.json or form.regex or form.grammar or ""
        size = len(text) if isinstance(text, str) else 0
        if size > most:
            raise ValueError(
                f"`structured_outputs` must have at most {most:,} characters, got {size:,}"
            )
        _check_multiples(text)
        longest = max(map(len, REGEX.findall(form.grammar or "")), default=0)
        if longest > MAX_REGEX:
            raise ValueError(
                f"`structured_outputs` must have regular expressions of at most {MAX_REGEX:,} "
                f"characters, got {longest:,}"
            )


def _check_multiples(text: Any) -> None:
    """Raise if a schema, or one in a grammar, asks for multiples that take minutes to compile."""
    if not isinstance(text, str):
        return
    read = ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)
    may_meet = TOGETHER.search(read) is not None
    num_states = 1 if may_meet else 0
    for found in dict.fromkeys(MULTIPLE.findall(read)):
        with suppress(ValueError):  # no number: the schema is refused for it
            number = Fraction(min(float(found), MAX_MULTIPLE + 1))
            count = number.limit_denominator(MAX_MULTIPLE).numerator or 1
            num_states = math.lcm(num_states, count) if may_meet else num_states + count
        if num_states > MAX_MULTIPLE:
            raise ValueError(
                f"`structured_outputs` must have a `multipleOf` of at most {MAX_MULTIPLE:,}, as "
                f"sum or common multiple of several, got {found}: check numbers after generation"
            )


def _check_logprobs(ask: Ask, max_model_len: int) -> None:
    params = ask.params
    num_generated = min(params.max_tokens or max_model_len, max_model_len)
    num_generated *= len(ask.prompts) * params.n
    num_prompt = sum(len(prompt["prompt_token_ids"]) for prompt in ask.prompts)
    if ask.echo:  # then they stand in each choice, as `logprobs`
        num_generated += num_prompt * params.n
        num_prompt = 0
    each = 0 if params.logprobs is None else params.logprobs + 1
    each = max(each, len(params.logprob_token_ids or ()))
    if (total := num_generated * each) > MAX_LOGPROBS:
        raise ValueError(
            f"`logprobs` must be at most {MAX_LOGPROBS:,} for all tokens of all choices, "
            f"got {total:,}: lower max_tokens, n or their number"
        )
    each = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    if (total := num_prompt * each) > MAX_LOGPROBS:
        raise ValueError(
            f"`prompt_logprobs` must be at most {MAX_LOGPROBS:,} for all tokens of all prompts, "
            f"got {total:,}: lower their number, or shorten the prompts"
        )
