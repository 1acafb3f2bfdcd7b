"""Beam search over log-probabilities of next tokens, from whatever source.

Candidates, their order and the end of a beam are as in vLLM. Imports no torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

from nanovllm.outputs import BeamSearchSequence
from nanovllm.sampling_params import BeamSearchParams
from nanovllm.utils.progress import SHOWN, SILENT, tqdm

Candidates: TypeAlias = Mapping[int, float]  # log-probabilities of next tokens, by token id


class BeamSearch:
    """The search for one prompt: `advance` lengthens the `beams` until none is left.

    All beams have the same length. A beam that has ended competes by its score, see
    `BeamSearchParams`, with those that end later. `error` is the reason why the search could not
    go on, or None.

    Args:
        prompt: token ids of the prompt.
        params: parameters of the search.
        eos_token_ids: tokens that end a beam, unless `ignore_eos`.
        max_model_len: maximum length of prompt and output together, in tokens.
    """

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_model_len: int,
    ) -> None:
        self.beams = [BeamSearchSequence(prompt, 0.0)]
        self.error: str | None = None
        self._finished: list[BeamSearchSequence] = []
        self._width, self._length_penalty = params.beam_width, params.length_penalty
        self._eos_token_ids = () if params.ignore_eos else eos_token_ids
        self._max_len = min(len(prompt) + params.max_tokens, max_model_len)

    def advance(self, candidates: Sequence[Candidates | str]) -> None:
        """Lengthen the beams by their most likely next tokens, given in the order of the beams. An
        error in place of a beam's candidates ends the search.

        A candidate that ends its beam is kept, however many are likelier; of the others the
        `beam_width` most likely continue.
        """
        grown = []  # (log-probability, beam, token); only the best become lists of tokens
        for beam, logprobs in zip(self.beams, candidates, strict=True):
            if isinstance(logprobs, str):
                self.beams, self.error = [], logprobs
                return
            for token, logprob in logprobs.items():
                total = beam.cum_logprob + logprob
                if token in self._eos_token_ids:
                    tokens = [*beam.tokens, token]
                    self._finished.append(BeamSearchSequence(tokens, total, "", "stop", token))
                else:
                    grown.append((total, beam, token))
        grown.sort(key=itemgetter(0), reverse=True)
        self.beams = [
            BeamSearchSequence([*beam.tokens, token], total)
            for total, beam, token in grown[: self._width]
        ]
        if self.beams and len(self.beams[0].tokens) == self._max_len:
            self._finished += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []
        self._finished = self.best()
        if self.beams and self._is_decided():
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """The sequences that have ended, at most `beam_width`, the best first."""
        return sorted(self._finished, key=self._score, reverse=True)[: self._width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return beam.cum_logprob / length**self._length_penalty

    def _is_decided(self) -> bool:
        """Whether no beam can become better than all that have ended.

        The log-probability of a beam never rises. So its best score is its present log-probability
        at the length that the penalty favours.
        """
        if len(self._finished) < self._width:
            return False
        beam = self.beams[0]
        length = self._max_len if self._length_penalty > 0 else len(beam.tokens)
        return beam.cum_logprob / length**self._length_penalty <= self._score(self._finished[-1])


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    next_tokens: Callable[[list[tuple[int, list[int]]]], Sequence[Candidates | str]],
    *,
    eos_token_ids: Collection[int],
    max_model_len: int,
    use_tqdm: bool = False,
) -> list[list[BeamSearchSequence] | str]:
    """The best sequences for each prompt, or an error. All beams of all prompts advance together.

    Args:
        prompts: token ids of the prompts.
        params: parameters of the search, for all prompts.
        next_tokens: function that gives, for sequences, each the number of its prompt and its
            tokens, the most likely next tokens of each, or an error.
        eos_token_ids: tokens that end a beam, see `BeamSearch`.
        max_model_len: maximum length of prompt and output together, in tokens.
        use_tqdm: whether to show a progress bar.
    """
    searches = [BeamSearch(p, params, eos_token_ids, max_model_len) for p in prompts]
    options = SHOWN if use_tqdm else SILENT
    with tqdm(total=params.max_tokens, desc="Beam search", unit="tok", **options) as bar:
        while running := [i for i, search in enumerate(searches) if search.beams]:
            sequences = [(i, beam.tokens) for i in running for beam in searches[i].beams]
            candidates = iter(next_tokens(sequences))
            for i in running:
                searches[i].advance(list(islice(candidates, len(searches[i].beams))))
            bar.update()
    return [search.error or search.best() for search in searches]
