"""Answers of the server in OpenAI's form: whole, and as the events of a stream.

The part that all events of a stream share is written once; of most, only the text is encoded.
"""

import json
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring as quote  # in C; text that is not ASCII stays as it is
from typing import Any

from nanovllm.openai.asks import Ask
from nanovllm.openai.calls import THINK_END, Call, Splitter
from nanovllm.openai.choices import LEAST_LOGPROB, chat_logprobs, text_logprobs, usage
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = "data: [DONE]\n\n"
GOES_ON: Mapping[str, Any] = {"logprobs": None, "finish_reason": None}  # a choice


class Choice:
    """A choice that is told part by part.

    Args:
        ask: request.
        index: its index in the answer.
        tokenizer: tokenizer of the model.

    Attributes:
        index: its index.
        has_begun: whether a part was told.
        num_reasoning_tokens: number of tokens of its reasoning, tags included.
        num_chars: characters of the tokens told so far that have log-probabilities.
    """

    def __init__(self, ask: Ask, index: int, tokenizer: Any) -> None:
        self.index, self.has_begun, self.num_chars = index, False, 0
        self._ask, self._tokenizer, self._num_calls = ask, tokenizer, 0
        self._token_ids: list[int] = []  # while they are or may be reasoning
        self.num_reasoning_tokens = 0
        self._splitter: Splitter | None = None
        if ask.may_reason or ask.may_call:
            self._splitter = Splitter(
                may_reason=ask.may_reason, is_reasoning=ask.is_reasoning, may_call=ask.may_call
            )

    def read(self, part: CompletionOutput) -> list[dict[str, Any]]:
        """The deltas that a part makes of a chat's message: one of texts, and one for each piece of
        news of a call.
        """
        if self._splitter is None:
            return [{"content": part.text}] if part.text else []
        was_reasoning = self._splitter.is_reasoning
        said = self._splitter.feed(part.text, is_end=part.finished())
        if self._ask.may_reason and was_reasoning is not False:
            self._count_reasoning(part.token_ids, self._splitter)
        reasoning = said.reasoning if self._ask.shows_reasoning else ""
        fields = {
            "reasoning": reasoning,  # vLLM's name, and DeepSeek's
            "reasoning_content": reasoning,
            "content": said.content,
        }
        texts = {name: text for name, text in fields.items() if text}
        deltas: list[dict[str, Any]] = [texts] if texts else []
        for call in said.calls:
            self._num_calls += call.name is not None
            if self._num_calls > 1 and not self._ask.may_call_again:
                break
            news = _call_news(call, self._num_calls - 1)
            deltas += [{"tool_calls": [each]} for each in news]
        return deltas

    def _count_reasoning(self, token_ids: list[int], splitter: Splitter) -> None:
        """Count the tokens of the reasoning after more of them, where it is known to be one."""
        self._token_ids += token_ids
        held, count = self._token_ids, len(self._token_ids)
        if splitter.has_reasoned:
            if not splitter.is_reasoning:  # it ended in these tokens
                count = bisect_left(
                    range(count),
                    True,
                    key=lambda end: THINK_END in self._tokenizer.decode(held[:end]),
                )
            self.num_reasoning_tokens = count
        if splitter.is_reasoning is False:
            self._token_ids = []

    def finish_reason(self, part: CompletionOutput) -> str | None:
        """The `finish_reason` of a chat."""
        reason = part.finish_reason
        return "tool_calls" if self._num_calls and reason == "stop" else reason


class Answer:
    """The answer to a request. Outputs come with the number of their prompt among the prompts.

    Args:
        ask: request.
        model: name of the model.
        answer_id: its id, without the prefix of its kind.
        tokenizer: tokenizer of the model, which may be None.
    """

    def __init__(self, ask: Ask, model: str, answer_id: str, tokenizer: Any) -> None:
        self._ask, self._tokenizer = ask, tokenizer
        kind, prefix = "text_completion", "cmpl"
        if ask.is_chat:
            kind, prefix = "chat.completion.chunk" if ask.streams else "chat.completion", "chatcmpl"
        self._head = {
            "id": f"{prefix}-{answer_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._start = f"data: {dumps(self._head)[:-1]},"
        self._choices: dict[int, Choice] = {}
        self._outputs: dict[int, RequestOutput] = {}  # the last of each prompt
        self._num_tokens = 0  # generated
        params = ask.params
        self._is_plain = not (  # a part of a choice is its text
            ask.may_reason
            or ask.may_call
            or ask.has_ids
            or ask.all_usage
            or ask.echo
            or params.logprobs is not None
            or params.logprob_token_ids is not None
        )

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer made of the finished outputs of all prompts."""
        choices = []
        for number, output in enumerate(outputs):
            for part in output.outputs:
                choice = self._choice_of(number, output, part)
                if self._ask.is_chat:
                    choices.append(self._chat_choice(choice, part))
                else:
                    choices.append(self._text_choice(choice, part, output))
        more = self._of_prompt(outputs[0]) if self._ask.is_chat else {}
        return {**self._head, "choices": choices, "usage": self._usage(), **more}

    def events(self, number: int, output: RequestOutput) -> str:
        """The events of what is new of a prompt."""
        said = []
        for part in output.outputs:
            choice = self._choice_of(number, output, part)
            if self._is_plain and choice.has_begun and part.finish_reason is None:
                if part.text:
                    said.append(self._plain_event(choice, part.text))
            elif self._ask.is_chat:
                said += self._chat_events(choice, part, output)
            else:
                said += self._text_events(choice, part, output)
        return "".join(said)

    def end(self) -> str:
        """The last events of a stream."""
        last = self._event(usage=self._usage()) if self._ask.has_usage else ""
        return last + DONE

    def _choice_of(self, number: int, output: RequestOutput, part: CompletionOutput) -> Choice:
        """The choice that a part belongs to, and count its tokens."""
        self._outputs[number] = output
        self._num_tokens += len(part.token_ids)
        index = number * self._ask.params.n + part.index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = Choice(self._ask, index, self._tokenizer)
        return choice

    # -- events -----------------------------------------------------------------------------------

    def _event(self, *choices: dict[str, Any], **more: Any) -> str:
        if self._ask.all_usage:
            more["usage"] = self._usage()
        return f"{self._start}{dumps({'choices': choices, **more})[1:]}\n\n"

    def _plain_event(self, choice: Choice, text: str) -> str:
        """The result of `_event` for a part that has text alone, in a tenth of the time."""
        name, after = '"text":', ""
        if self._ask.is_chat:
            name, after = '"delta":{"content":', "}"
        return (
            f'{self._start}"choices":[{{"index":{choice.index},{name}{quote(text)}{after},'
            '"logprobs":null,"finish_reason":null}]}\n\n'
        )

    def _chat_events(
        self, choice: Choice, part: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        said = []
        if not choice.has_begun:
            choice.has_begun = True
            piece = self._chat_piece(choice, {"role": "assistant", "content": ""})
            ids = {"prompt_token_ids": output.prompt_token_ids} if self._ask.has_ids else {}
            said.append(self._event(piece, **ids))
        *deltas, last = choice.read(part) or [{}]
        said += [self._event(self._chat_piece(choice, delta)) for delta in deltas]
        piece = self._chat_piece(choice, last, part)
        has_news = piece["delta"] or piece["logprobs"] or piece["finish_reason"]
        if has_news or self._ask.has_ids:
            said.append(self._event(piece))
        return said

    def _text_events(
        self, choice: Choice, part: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        piece = self._text_choice(choice, part, output)
        has_news = piece["text"] or piece["logprobs"] or piece["finish_reason"]
        return [self._event(piece)] if has_news or self._ask.has_ids else []

    # -- choices ----------------------------------------------------------------------------------

    def _chat_piece(
        self, choice: Choice, delta: dict[str, Any], part: CompletionOutput | None = None
    ) -> dict[str, Any]:
        """A delta of a chat's choice; with what else is new by a part, if it is the last of it."""
        end = GOES_ON if part is None else self._chat_end(choice, part)
        return {"index": choice.index, "delta": delta, **end}

    def _chat_choice(self, choice: Choice, part: CompletionOutput) -> dict[str, Any]:
        """A whole choice of a chat."""
        message = _chat_message(choice.read(part))
        return {"index": choice.index, "message": message, **self._chat_end(choice, part)}

    def _chat_end(self, choice: Choice, part: CompletionOutput) -> dict[str, Any]:
        """The fields of a chat's choice beside its text, which is read before."""
        return {
            "logprobs": self._chat_logprobs(part),
            "finish_reason": choice.finish_reason(part),
            **({"token_ids": part.token_ids} if self._ask.has_ids else {}),
        }

    def _chat_logprobs(self, part: CompletionOutput) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        params = self._ask.params
        max_shown = params.logprobs if params.logprob_token_ids is None else None
        return chat_logprobs(part.logprobs, max_shown, as_ids=self._ask.as_ids)

    def _text_choice(
        self, choice: Choice, part: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """The news of a completion; first of all its prompt, if that is echoed."""
        ask, text, token_ids = self._ask, part.text, part.token_ids
        places = None if part.logprobs is None else list(part.logprobs)
        if ask.drops_tokens:
            text, token_ids, places = "", [], None if places is None else []
        is_first, choice.has_begun = not choice.has_begun, True
        is_echo = is_first and ask.echo
        if is_echo:
            text = self._prompt_text(output) + text
            if places is not None:
                places = [*self._prompt_places(output), *places]
        columns = None
        if places is not None:
            columns = text_logprobs(places, choice.num_chars, as_ids=ask.as_ids)
            choice.num_chars += sum(len(_drawn(place).decoded_token or "") for place in places)
            if is_echo:  # nothing is before the first token
                columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        return {
            "index": choice.index,
            "text": text,
            "logprobs": columns,
            "finish_reason": part.finish_reason,
            **(self._of_prompt(output) if is_first else {}),
            **({"token_ids": token_ids} if ask.has_ids else {}),
        }

    # -- prompts ----------------------------------------------------------------------------------

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        text: str = self._tokenizer.decode(output.prompt_token_ids)
        return text

    def _prompt_places(self, output: RequestOutput) -> list[Any]:
        """The log-probabilities of a prompt; in the place of the first token, which has none, one
        that is not told.
        """
        assert output.prompt_logprobs is not None, "an echo with log-probabilities asks for them"
        first = output.prompt_token_ids[0]
        text = None if self._tokenizer is None else self._tokenizer.decode([first])
        return [{first: Logprob(0.0, None, text)}, *output.prompt_logprobs[1:]]

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Fields about a prompt that were asked for, log-probabilities as vLLM shows them."""
        fields: dict[str, Any] = {}
        if self._ask.has_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None and not self._ask.echo:
            fields["prompt_logprobs"] = [
                place and {str(token): _shown(each) for token, each in place.items()}
                for place in output.prompt_logprobs
            ]
        return fields

    def _usage(self) -> dict[str, Any]:
        prompts = self._outputs.values()
        return usage(
            sum(len(output.prompt_token_ids) for output in prompts),
            0 if self._ask.drops_tokens else self._num_tokens,
            sum(output.num_cached_tokens for output in prompts),
            self._num_reasoning() if self._ask.may_reason else None,
        )

    def _num_reasoning(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self._choices.values())


def _call_news(call: Call, index: int) -> Iterator[dict[str, Any]]:
    """The news of a call as OpenAI's streams have it: its beginning, then its arguments."""
    if call.name is not None:
        function = {"name": call.name, "arguments": ""}
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        yield {"index": index, "id": call_id, "type": "function", "function": function}
    if call.arguments:
        yield {"index": index, "function": {"arguments": call.arguments}}


def _chat_message(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that deltas make."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for news in delta.get("tool_calls", ()):
            if "id" in news:
                calls.append({name: value for name, value in news.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += news["function"]["arguments"]
        message |= delta
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _shown(token: Logprob) -> dict[str, Any]:
    return {**vars(token), "logprob": max(token.logprob, LEAST_LOGPROB)}


def _drawn(place: Mapping[int, Logprob]) -> Logprob:
    return next(iter(place.values()))
