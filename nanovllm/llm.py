"""`LLM`: the user's class."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """An offline engine for one model: `LLM(directory, **options).generate(prompts)`.

    All options are those of `nanovllm.config.Config`. Use it as a context manager, or call
    `exit()`, to give the memory back at a known time.
    """
