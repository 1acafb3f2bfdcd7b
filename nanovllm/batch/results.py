"""`Result`: a row with its answer, and the line that tells of it."""

from dataclasses import dataclass
from typing import Any

from nanovllm.batch.openai_batch import answer
from nanovllm.batch.rows import Row
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.as_json import as_json


@dataclass(frozen=True)
class Result:
    """A row with its answer.

    Attributes:
        row: the row.
        output: its answer; None if it has none.
        error: why; None if it has one.
        params: how it was sampled; None if it was refused.
        model: the model's name.
    """

    row: Row
    output: RequestOutput | None = None
    error: str | None = None
    params: SamplingParams | None = None
    model: str = ""

    @property
    def num_generated_tokens(self) -> int:
        """Of all its completions."""
        return sum(len(each.token_ids) for each in self.output.outputs) if self.output else 0

    def to_dict(self) -> dict[str, Any]:
        """What is written of it.

        The fields of the row, over which these are laid: `_key` (what it is known by; of a row with
        a `custom_id` a hash of its contents follows), `_row` (its number), `generated_text`,
        `finish_reason`, `num_prompt_tokens`, `num_generated_tokens` (None without an answer) and
        `error` (None with one). Where more was asked for than one text, `outputs` has all
        completions as `CompletionOutput.to_dict` gives them, and `prompt_logprobs` is as in
        `RequestOutput.to_dict`. A request of OpenAI's batch format has a result of that format.
        """
        if self.row.is_openai:
            was_refused = self.params is None
            return answer(self.row, self.output, self.error, self.model, was_refused)
        row = self.row
        values: dict[str, Any] = {"_key": None, "_row": None, **row.fields}
        values |= {"_key": row.result_id.hex(), "_row": row.number, **self.answer()}
        values.pop("error")
        return {**values, "error": self.error}  # last: a line tells by its end whether it failed

    def answer(self) -> dict[str, Any]:
        """The fields of `to_dict` that are not the row's."""
        output, params = self.output, self.params
        first = output.outputs[0] if output is not None else None
        values: dict[str, Any] = {
            "generated_text": first and first.text,
            "finish_reason": first and first.finish_reason,
            "num_prompt_tokens": None if output is None else len(output.prompt_token_ids),
            "num_generated_tokens": None if output is None else self.num_generated_tokens,
        }
        if output is not None and params is not None:
            if params.n > 1 or params.logprobs is not None or not params.detokenize:
                values["outputs"] = [each.to_dict() for each in output.outputs]
            if params.prompt_logprobs is not None:
                values["prompt_logprobs"] = output.to_dict()["prompt_logprobs"]
        return {**values, "error": self.error}

    def to_line(self) -> bytes:
        """The same as a line of JSON in UTF-8, see `as_json`. Half characters (lone surrogates) are
        written as escapes.
        """
        values = self.to_dict()
        try:
            return as_json(values, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:
            return as_json(values).encode() + b"\n"
