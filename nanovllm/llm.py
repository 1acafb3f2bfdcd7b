"""`LLM`: the user's class."""

import math

from nanovllm.engine.inputs import Prompts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoreOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_choice

POOLING = ("last", "mean")


class LLM(LLMEngine):
    """An offline engine for one model: `LLM(directory, **options).generate(prompts)`.

    All options are those of `nanovllm.config.Config`. Use it as a context manager, or call
    `exit()`, to give the memory back at a known time.
    """

    def score(self, prompts: Prompts, use_tqdm: bool = True) -> list[ScoreOutput]:
        """How likely texts are, token by token: for perplexity, and to compare answers.

        Logits are computed for some hundred tokens at a time, so long texts need no more memory.

        Args:
            prompts: as for `generate`; each leaves room for one token within `max_model_len`.
            use_tqdm: show a progress bar.

        Returns:
            One for each prompt, in their order.

        Raises:
            as `generate`.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = []
        for output in self.generate(prompts, params, use_tqdm):
            token_ids, places = output.prompt_token_ids, output.prompt_logprobs
            assert places is not None
            logprobs = [places[i][token_ids[i]].logprob for i in range(1, len(token_ids))]
            outputs.append(ScoreOutput(token_ids, logprobs))
        return outputs

    def embed(
        self,
        prompts: Prompts,
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Texts as vectors: hidden states behind the final norm.

        Args:
            prompts: as for `generate`.
            pooling: "last" takes that of the last token, "mean" the mean over all tokens.
            normalize: scale each vector to length 1.
            use_tqdm: show a progress bar.

        Returns:
            One for each prompt, in their order.

        Raises:
            as `generate`.
        """
        check_choice("pooling", pooling, POOLING)
        check_bool("normalize", normalize)
        parsed = self._reader.parse_all(prompts)
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        outputs = []
        for output in self._complete(parsed, [params] * len(parsed), use_tqdm, pooling):
            vector = output.embedding
            assert vector is not None
            if normalize:
                length = math.hypot(*vector) or 1.0
                vector = [value / length for value in vector]
            outputs.append(
                EmbeddingRequestOutput(
                    output.request_id, EmbeddingOutput(vector), output.prompt_token_ids, True
                )
            )
        return outputs
