"""Answers in OpenAI's form: whole, and as the events of a stream.

What all events of a stream have in common is written once; of most, only the text is encoded.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring as quote  # in C; text that is not ASCII stays as it is
from typing import Any, NamedTuple

from nanovllm.batch.openai_api import LEAST_LOGPROB, chat_logprobs, text_logprobs, usage
from nanovllm.openai.asks import Ask
from nanovllm.openai.calls import THINK_END, Splitter
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = "data: [DONE]\n\n"


class Said(NamedTuple):
    """What is new of a chat's choice: content, reasoning, and calls as deltas of a stream."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]

    def fields(self) -> dict[str, Any]:
        """The fields that are not empty; reasoning under the names of vLLM and DeepSeek."""
        named = {
            "reasoning": self.reasoning,
            "reasoning_content": self.reasoning,
            "content": self.content,
            "tool_calls": self.calls,
        }
        return {name: value for name, value in named.items() if value}


class Choice:
    """The state of a completion that is told part by part.

    Args:
        ask: request.
        think_end: token that ends reasoning; None: no single one does.

    Attributes:
        has_begun: whether a part was told.
        num_tokens: tokens so far.
        num_chars: characters of these tokens.
    """

    def __init__(self, ask: Ask, think_end: int | None) -> None:
        self._ask, self._think_end = ask, think_end
        self.splitter: Splitter | None = None
        if ask.may_reason or ask.may_call:
            self.splitter = Splitter(
                may_reason=ask.may_reason, is_reasoning=ask.is_reasoning, may_call=ask.may_call
            )
        self.has_begun = self._has_thought = False
        self.num_tokens = self.num_chars = self._num_thought = self._num_calls = 0

    def count(self, part: CompletionOutput) -> None:
        """Count the tokens of a part, those of reasoning apart."""
        token_ids = part.token_ids
        self.num_tokens += len(token_ids)
        if self._ask.may_reason and not self._has_thought:
            end = self._think_end
            self._has_thought = end is not None and end in token_ids
            self._num_thought += len(token_ids)
            if end is not None and self._has_thought:
                self._num_thought += token_ids.index(end) - len(token_ids)

    @property
    def num_reasoning(self) -> int:
        """Number of the tokens before the one that ends reasoning."""
        is_reasoning = self.splitter is not None and self.splitter.is_reasoning
        return self._num_thought if self._has_thought or is_reasoning else 0

    def split(self, part: CompletionOutput) -> Said:
        """What a part says."""
        if self.splitter is None:
            return Said(part.text, "", [])
        said = {"content": "", "reasoning": ""}
        calls: dict[int, dict[str, Any]] = {}
        for kind, text in self.splitter.feed(part.text, is_end=part.finished()):
            if kind in said:
                said[kind] += text
                continue
            self._num_calls += kind == "call"
            index, most = self._num_calls - 1, self._ask.most_calls
            if most is not None and index >= most:
                continue
            if kind == "call":
                own_id = f"call_{uuid.uuid4().hex[:24]}"
                function = {"name": text, "arguments": ""}
                calls[index] = {"index": index, "id": own_id, "type": "function"}
                calls[index]["function"] = function
            else:
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
        reasoning = said["reasoning"] if self._ask.shows_reasoning else ""
        return Said(said["content"], reasoning, [*calls.values()])

    def reason(self, part: CompletionOutput) -> str | None:
        """The `finish_reason`."""
        return (
            "tool_calls" if self._num_calls and part.finish_reason == "stop" else part.finish_reason
        )


class Answer:
    """The answer to a request. Outputs come with the number of their prompt among the prompts.

    Args:
        ask: request.
        model: name of the model.
        request_id: id of the request.
        tokenizer: tokenizer of the model, which may be None.
    """

    def __init__(self, ask: Ask, model: str, request_id: str, tokenizer: Any) -> None:
        self._ask, self._tokenizer = ask, tokenizer
        kind, prefix = "text_completion", "cmpl"
        if ask.is_chat:
            kind, prefix = "chat.completion.chunk" if ask.streams else "chat.completion", "chatcmpl"
        own_id, now = f"{prefix}-{request_id}", int(time.time())
        self._head = {"id": own_id, "object": kind, "created": now, "model": model}
        self._start = f"data: {dumps(self._head)[:-1]},"
        self._think_end: int | None = None
        if ask.may_reason:  # most often the tag is a token of its own
            found = tokenizer.convert_tokens_to_ids(THINK_END)
            self._think_end = None if found == tokenizer.unk_token_id else found
        self._choices: dict[int, Choice] = {}
        self._outputs: dict[int, RequestOutput] = {}  # the last of each prompt
        params = ask.params
        has_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        splits = ask.may_reason or ask.may_call
        self._is_plain = not (has_logprobs or splits or ask.has_ids or ask.echo or ask.drops_tokens)

    def _take(self, number: int, output: RequestOutput) -> Iterator[tuple[int, Choice, Any]]:
        """The index of each choice that has news, its state and the news."""
        self._outputs[number] = output
        for part in output.outputs:
            index = number * self._ask.params.n + part.index
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = Choice(self._ask, self._think_end)
            choice.count(part)
            yield index, choice, part

    # -- as a stream ------------------------------------------------------------------------------

    def events(self, number: int, output: RequestOutput) -> str:
        """The events of what is new of a prompt."""
        tell = self._chat_events if self._ask.is_chat else self._text_event
        news = self._take(number, output)
        return "".join([tell(index, choice, part, output) for index, choice, part in news])

    def end(self) -> str:
        """The last events."""
        if not self._ask.has_usage:
            return DONE
        return f'{self._start}"choices":[],"usage":{dumps(self._usage())}}}\n\n{DONE}'

    def _event(self, choice: str, more: str = "") -> str:
        if self._ask.all_usage:
            more += f',"usage":{dumps(self._usage())}'
        return f'{self._start}"choices":[{choice}]{more}}}\n\n'

    def _chat_events(
        self, index: int, choice: Choice, part: CompletionOutput, output: RequestOutput
    ) -> str:
        begin = ""
        if not choice.has_begun:
            choice.has_begun = True
            role = '{"role":"assistant","content":""}'
            ids = (
                f',"prompt_token_ids":{dumps(output.prompt_token_ids)}' if self._ask.has_ids else ""
            )
            begin = self._event(_chat_piece(index, role, None), ids)
        if self._is_plain:
            if not part.text and part.finish_reason is None:
                return begin
            delta = f'{{"content":{quote(part.text)}}}' if part.text else "{}"
            return begin + self._event(_chat_piece(index, delta, part.finish_reason))
        fields = choice.split(part).fields()
        reason, logprobs = choice.reason(part), self._chat_logprobs(part)
        if not (fields or reason or logprobs or self._ask.has_ids):
            return begin
        ids = f',"token_ids":{dumps(part.token_ids)}' if self._ask.has_ids else ""
        piece = _chat_piece(index, dumps(fields), reason, dumps(logprobs), ids)
        return begin + self._event(piece)

    def _text_event(
        self, index: int, choice: Choice, part: CompletionOutput, output: RequestOutput
    ) -> str:
        reason = part.finish_reason
        if self._is_plain:
            if not part.text and reason is None:
                return ""
            text, end = quote(part.text), "null" if reason is None else f'"{reason}"'
            return self._event(
                f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":{end}}}'
            )
        fields = self._text_choice(index, choice, part, output)
        has_news = fields["text"] or fields["logprobs"] or reason or self._ask.has_ids
        return self._event(dumps(fields)) if has_news else ""

    # -- as a whole -------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer made of the finished outputs of all prompts."""
        choices, more = [], {}
        for number, output in enumerate(outputs):
            for index, choice, part in self._take(number, output):
                if self._ask.is_chat:
                    choices.append(self._chat_choice(index, choice, part))
                else:
                    choices.append(self._text_choice(index, choice, part, output))
        if self._ask.is_chat:
            more = self._of_prompt(outputs[0])
        return {**self._head, "choices": choices, "usage": self._usage(), **more}

    def _chat_choice(self, index: int, choice: Choice, part: CompletionOutput) -> dict[str, Any]:
        said = choice.split(part)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        message |= said.fields()
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"}
                for call in said.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._chat_logprobs(part),
            "finish_reason": choice.reason(part),
            **({"token_ids": part.token_ids} if self._ask.has_ids else {}),
        }

    # -- parts of both ----------------------------------------------------------------------------

    def _chat_logprobs(self, part: CompletionOutput) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        return chat_logprobs(part.logprobs, self._ask.most, as_ids=self._ask.as_ids)

    def _text_choice(
        self, index: int, choice: Choice, part: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """What is new of a completion; first of all its prompt, if that is echoed."""
        ask, text, token_ids = self._ask, part.text, part.token_ids
        places = None if part.logprobs is None else list(part.logprobs)
        if ask.drops_tokens:
            text, token_ids, places = "", [], None if places is None else []
        is_first, choice.has_begun = not choice.has_begun, True
        if is_first and ask.echo:
            text = self._prompt_text(output) + text
            if places is not None:
                places = [*self._prompt_places(output), *places]
        columns = None
        if places is not None:
            columns = text_logprobs(places, choice.num_chars, as_ids=ask.as_ids)
            if is_first and ask.echo:  # nothing is before the first token
                columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
            choice.num_chars += sum(len(_drawn(place).decoded_token or "") for place in places)
        return {
            "index": index,
            "text": text,
            "logprobs": columns,
            "finish_reason": part.finish_reason,
            **(self._of_prompt(output) if is_first else {}),
            **({"token_ids": token_ids} if ask.has_ids else {}),
        }

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids)

    def _prompt_places(self, output: RequestOutput) -> list[Any]:
        """The log-probabilities of a prompt; in the place of the first token, which has none, one
        that is not told.
        """
        assert output.prompt_logprobs is not None
        first = output.prompt_token_ids[0]
        text = None if self._tokenizer is None else self._tokenizer.decode([first])
        return [{first: Logprob(0.0, None, text)}, *output.prompt_logprobs[1:]]

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Fields about a prompt that were asked for."""
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
        prompts, choices = self._outputs.values(), self._choices.values()
        tokens = 0 if self._ask.drops_tokens else sum(choice.num_tokens for choice in choices)
        found = usage(
            sum(len(output.prompt_token_ids) for output in prompts),
            tokens,
            sum(output.num_cached_tokens for output in prompts),
        )
        if self._think_end is not None:
            num_reasoning = sum(choice.num_reasoning for choice in choices)
            found["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return found


def _chat_piece(
    index: int, delta: str, reason: str | None, logprobs: str = "null", more: str = ""
) -> str:
    """A choice of a stream's event, of parts that are JSON already."""
    end = "null" if reason is None else f'"{reason}"'
    return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{end}{more}}}'


def _shown(token: Logprob) -> dict[str, Any]:
    """A log-probability as vLLM shows it."""
    return {**vars(token), "logprob": max(token.logprob, LEAST_LOGPROB)}


def _drawn(place: Mapping[int, Logprob]) -> Logprob:
    return next(iter(place.values()))
