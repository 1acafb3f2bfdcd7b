"""`RemoteRequest`: a request that a replica computes; `Order`: the same, as the replica gets it."""

from typing import NamedTuple

from nanovllm.engine.sequence import NO_LIMIT
from nanovllm.images.image import PlacedImage
from nanovllm.outputs import RequestOutput, TokenLogprobs
from nanovllm.requests.intake import Intake
from nanovllm.requests.request import CheckedRequest, Listener, Ticket
from nanovllm.requests.text import Decoder
from nanovllm.sampling_params import SamplingParams

MAX_LOSSES = 3  # replicas that may die with a request before it fails; the last computes it alone


class Order(NamedTuple):
    """A request as a replica gets it.

    Attributes:
        ticket: ids, arrival time, and the tokens from which completions continue.
        token_ids: token ids of the prompt.
        params: sampling parameters.
        pooling: "last" or "mean" hidden state of the prompt, for embeddings; else None.
        has_listener: whether news is wanted after each step.
        images: images of the prompt.
    """

    ticket: Ticket
    token_ids: list[int]
    params: SamplingParams
    pooling: str | None
    has_listener: bool
    images: tuple[PlacedImage, ...] = ()


def remote(
    intake: Intake,
    checked: CheckedRequest,
    pooling: str | None,
    listener: Listener | None,
    ticket: Ticket | None = None,
) -> "RemoteRequest":
    """Make a new request; see `Intake.make`."""
    return RemoteRequest(checked, ticket or intake.ticket(checked.params.n), pooling, listener)


class RemoteRequest:
    """A request that stays with the caller's process and can go to another replica at any time: its
    completions continue there from the tokens that a listener has got; without a listener they
    begin anew.

    Args:
        checked: request of the caller, checked.
        ticket: ids, arrival time, and the tokens of its completions so far.
        pooling: "last" or "mean", for embeddings.
        listener: function that gets outputs, see `LLMEngine.add_request`.

    Attributes:
        num_losses: number of replicas that died while they computed it.
        num_completion_tokens: known length of the longest completion, in tokens.
        weight_version: version of the weights that compute it, see `LLM.update_weights`.
    """

    weight_version: int | str = 0

    def __init__(
        self,
        checked: CheckedRequest,
        ticket: Ticket,
        pooling: str | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.num_losses = 0
        self.request_id = ticket.request_id
        self.prompt, self.prompt_token_ids = checked.text, checked.token_ids
        self.sampling_params, self.listener = checked.params, listener
        self._ticket, self._pooling, self._images = ticket, pooling, checked.images
        self._prompt_logprobs: TokenLogprobs | None = None
        self._result: RequestOutput | None = None
        self._error: str | None = None  # error of a completion
        self.num_completion_tokens = 0

    @property
    def num_seqs(self) -> int:
        """Number of completions that have not ended."""
        return len(self._ticket.completions)

    @property
    def is_finished(self) -> bool:
        return not self._ticket.completions

    @property
    def is_suspect(self) -> bool:
        """Whether this request may be the cause of the deaths of replicas."""
        return self.num_losses >= MAX_LOSSES - 1

    def lose(self) -> None:
        """Count the death of a replica that computed this request."""
        self.num_losses += 1

    @property
    def max_tokens(self) -> int:
        return self.sampling_params.max_tokens or NO_LIMIT

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.num_completion_tokens

    def order(self) -> Order:
        """The request as a replica gets it."""
        return Order(
            self._ticket,
            self.prompt_token_ids,
            self.sampling_params,
            self._pooling,
            self.listener is not None,
            self._images,
        )

    def book(self, news: RequestOutput) -> RequestOutput:
        """Book a replica's news. Returns it with the prompt, which does not travel."""
        if news.prompt_logprobs is not None:
            self._prompt_logprobs = news.prompt_logprobs
        self._error = news.error or self._error
        output = RequestOutput(
            **{
                **vars(news),
                "prompt": self.prompt,
                "prompt_token_ids": self.prompt_token_ids,
                "prompt_logprobs": self._prompt_logprobs,
                "error": self._error,
            }
        )
        completions = self._ticket.completions
        for each in output.outputs:
            told = completions[each.index]
            told.token_ids.extend(each.token_ids)
            told.logprob = each.cumulative_logprob or 0.0
            self.num_completion_tokens = max(self.num_completion_tokens, len(told.token_ids))
            if each.finished():
                del completions[each.index]
        if not completions and self.listener is None:
            self._result = output
        return output

    def fail(self, error: str) -> RequestOutput:
        """End the request with an error in place of a result."""
        self._ticket.completions.clear()
        self._result = RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, [], True, 0, error=error
        )
        return self._result

    def output(self, decode: Decoder) -> RequestOutput:
        """The result."""
        assert self._result is not None, f"request {self.request_id} has not finished"
        return self._result
