"""`Result`: a row with its answer, and their line in the output."""

from dataclasses import dataclass
from typing import Any

from nanovllm.batch.openai_batch import answer
from nanovllm.batch.params import wants_outputs
from nanovllm.batch.rows import Row
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.as_json import as_json


@dataclass(frozen=True)
class Result:
    """A row with its answer.

    Attributes:
        row: row of the input.
        output: answer; None: there is none.
        error: reason why there is no answer; None: there is one.
        params: sampling parameters of the answer; None: the row was refused.
        model: name of the model.
    """

    row: Row
    output: RequestOutput | None = None
    error: str | None = None
    params: SamplingParams | None = None
    model: str = ""

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all completions together."""
        return sum(len(each.token_ids) for each in self.output.outputs) if self.output else 0

    def to_dict(self) -> dict[str, Any]:
        """The fields of the result in the output.

        These are the row's fields and, taking precedence over them, `_key` (the row's key; for a
        row with a `custom_id` a hash of its contents follows), `_row` (its number),
        `generated_text`, `finish_reason`, `num_prompt_tokens`, `num_generated_tokens` (None without
        an answer) and `error` (None with one). If the row asks for more than one text, `outputs`
        has all completions in the form of `CompletionOutput.to_dict`, and `prompt_logprobs` is as
        in `RequestOutput.to_dict`. A request in OpenAI's batch format has a result in that format.
        """
        if self.row.is_openai:
            return answer(self.row, self.output, self.error, self.model, self.params)
        row = self.row
        values: dict[str, Any] = {"_key": None, "_row": None, **row.fields}
        values |= {"_key": row.result_id.hex(), "_row": row.number, **self.answer()}
        values.pop("error")
        return {**values, "error": self.error}  # last: the end of a line tells whether it failed

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
            if wants_outputs(params):
                values["outputs"] = [each.to_dict() for each in output.outputs]
            if params.prompt_logprobs is not None:
                values["prompt_logprobs"] = output.to_dict()["prompt_logprobs"]
        return {**values, "error": self.error}

    def to_line(self) -> bytes:
        """The fields of `to_dict` as a line of JSON in UTF-8, see `as_json`. Half characters (lone
        surrogates) are written as escapes.
        """
        values = self.to_dict()
        try:
            return as_json(values, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:
            return as_json(values).encode() + b"\n"

    def to_text_line(self) -> bytes:
        """The generated text on one line: line breaks are written as `\\n` and `\\r`, a backslash
        as two. A row that failed has an empty line.
        """
        text = self.answer()["generated_text"] or ""
        for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
            text = text.replace(plain, escaped)
        return text.encode(errors="replace") + b"\n"
