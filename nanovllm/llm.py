"""`LLM`: the user's class."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.chat import ChatRenderer, Conversation, Tool
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """An offline engine for one model: `LLM(directory, **options).generate(prompts)`.

    All options are those of `nanovllm.config.Config`. Use it as a context manager, or call
    `exit()`, to give the memory back at a known time.
    """

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: one conversation or a list of them. A conversation is a list of dictionaries
                with `role` and `content`: a string, or a list of `{"type": "text", "text": ...}`,
                which become its lines. Other keys are the template's.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: a Jinja template; None for the checkpoint's own.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: leave the last message open, for the model to go on with; needs
                `add_generation_prompt=False`.
            tools: what the model may call: JSON Schemas, or functions with types and docstrings.
            chat_template_kwargs: variables of the template, such as `enable_thinking`.

        Returns:
            One output per conversation, in their order. `prompt` is what the template made of it.

        Raises:
            TypeError, ValueError: naming the argument that is wrong; nothing has been queued.
            RuntimeError: as in `generate`.
        """
        renderer = ChatRenderer(
            self.tokenizer,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = renderer.render_all(messages)
        for name, prompt in prompts.items():
            self._reader.parse(prompt, name)  # here errors can name the conversation
        return self.generate(list(prompts.values()), sampling_params, use_tqdm)
