"""Chat with a model in the terminal; without --model, with the small one of the package.

Each line is a turn. /clear begins a new conversation, /exit or Ctrl-D ends. Ctrl-C stops an answer;
its text so far is kept. Answers are as long as the model allows, unless --max-tokens is given.
"""

import argparse
import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm import TINY, SamplingParams, __version__
from nanovllm.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    object_value,
    sampling_options,
)
from nanovllm.requests.chat import ChatRenderer

if TYPE_CHECKING:
    from nanovllm import LLM

# Fields of SamplingParams that make no difference to one answer on a screen, or leave none.
LEFT_OUT = (
    *("n", "logprobs", "logprobs_mode", "logprob_token_ids", "return_sampling_mask"),
    *("prompt_logprobs", "detokenize"),
)
TINY_KNOWS = "127+345=, reverse: hello =, count from 17:, introduce yourself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--model", help="directory of a checkpoint, or its name on the hub")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--chat-template-kwargs",
        type=object_value,
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}',
    )
    add_sampling_options(parser, leave_out=LEFT_OUT)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line by line, until the last."""
    given = sampling_options(args)
    SamplingParams(**given)  # raises for a mistake before a model is loaded
    from nanovllm import LLM

    with LLM(args.model or TINY, **engine_options(args)) as llm:
        params = replace(llm.get_default_sampling_params(), **{"max_tokens": None, **given})
        chat = Chat(llm, params, args.system, args.chat_template_kwargs)
        if args.model is None:
            print(f"Without --model, each line stands alone; try: {TINY_KNOWS}", file=sys.stderr)
        elif not chat.has_template:
            print("No chat template: each line is completed, on its own.", file=sys.stderr)
        chat.remembers = chat.has_template and args.model is not None
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(f"nanovllm {__version__}. /clear: begin anew; /exit: end; Ctrl-C: stop an answer")
            _talk(chat)
        else:
            for line in sys.stdin:
                if not _take(chat, line):
                    break
    return 0


class Chat:
    """A session that answers lines: with the conversation so far, if it `remembers`, or singly."""

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        system: str | None,
        variables: dict[str, Any] | None,
    ) -> None:
        self._llm, self._params = llm, params
        tokenizer = llm.get_tokenizer()
        self.has_template = tokenizer is None or bool(tokenizer.chat_template)
        self.remembers = self.has_template
        if self.has_template:  # the renderer refuses a model without a tokenizer
            self._renderer = ChatRenderer(
                tokenizer,
                llm.image_prompts,
                chat_template=None,
                add_generation_prompt=True,
                continue_final_message=False,
                tools=None,
                chat_template_kwargs=variables,
            )
        elif system is not None:
            raise ValueError(
                f"`system` must be left out for a model without a chat template, got {system!r}"
            )
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Begin a new conversation."""
        self._messages = self._begin

    def answer(self, line: str) -> None:
        """Print the answer to a line as it is generated.

        Raises:
            ValueError: if the line, or the conversation, is too long for the model.
        """
        prompt: Any = line
        messages = [*self._messages, {"role": "user", "content": line}]
        if self.has_template:
            prompt = self._renderer.render(messages, "messages")
        stream, said = self._llm.stream(prompt, self._params), ""
        try:
            for output in stream:
                news = "".join(completion.text for completion in output.outputs)
                said += news
                print(news, end="", flush=True)
                if output.error is not None:
                    print(f"\nnanovllm chat: {output.error}", file=sys.stderr)
        except KeyboardInterrupt:
            self._llm.abort_all()
            raise
        finally:
            print()
            if self.remembers:
                self._messages = [*messages, {"role": "assistant", "content": said}]


def _take(chat: Chat, line: str) -> bool:
    """Answer a line or follow its command. Returns whether the session goes on."""
    text = line.strip()
    if text == "/clear":
        chat.clear()
    elif text and text != "/exit":
        chat.answer(text)
    return text != "/exit"


def _talk(chat: Chat) -> None:
    """Read and answer lines from a terminal."""
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  input() edits lines with it
    while True:
        try:
            if not _take(chat, input("> ")):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # also while a line is typed
            print()
        except ValueError as error:
            print(f"nanovllm chat: {error} (/clear begins anew)", file=sys.stderr)
