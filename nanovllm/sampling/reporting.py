"""Reports on draws: log-probabilities, and the tokens that could have been drawn.

Letters: n rows with controls, m of them to report, V vocabulary, W = ceil(V / 32), K labels.

Sets of tokens travel to the host as ids where they are few, as with top_k: bits of the whole
vocabulary take longer to copy and to read than a step takes.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.sampling.controlled_sampler import Drawn
from nanovllm.sampling.controls import PROCESSED, RAW, Controls
from nanovllm.sampling.logprobs import Distributions, Labels, Logprobs, logprobs_of
from nanovllm.token_sets import num_words
from nanovllm.utils.arrays import Int32
from nanovllm.utils.device import runs_kernels, upload

MAX_LISTED = 255  # ids of a set; with their number a KiB
NO_LABELS = np.zeros(0, np.int32)


class Scored(NamedTuple):
    """Log-probabilities of m draws.

    Attributes:
        places: [m] int32, places of their rows among those that sample; -1: of none.
        logprobs: log-probabilities of their tokens, and of K labels.
        label_entries: [K] int32, index in 0..m of the draw that a label belongs to, ascending.
        label_tokens: [K] int32, the labels.
    """

    places: Int32
    logprobs: Logprobs
    label_entries: Int32 = NO_LABELS
    label_tokens: Int32 = NO_LABELS


class Left(NamedTuple):
    """The tokens that could have been drawn, of m draws.

    Attributes:
        places: [m] int32, places of their rows among those that sample.
        listed: [m, 1 + c] int32, the number of these tokens, and the first c of them, ascending;
            undefined where there are fewer. c is less than W, and at most `MAX_LISTED`.
        words: [m, W] int32: bit t % 32 of word t // 32 for token t.
    """

    places: Int32
    listed: torch.Tensor
    words: torch.Tensor


def score_own_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    distributions: Distributions,
    which: NDArray[np.bool_],
    batch_invariant: bool = False,
) -> Scored:
    """Log-probabilities of drawn tokens by the logits as they are. Where our kernels run, nothing
    is copied from the host.

    Args:
        logits: [n, V], of all rows that sample.
        tokens: [n] int32, drawn; negative: none.
        distributions: n distributions of all rows, without bounds.
        which: [n], rows that are wanted, whose divisors are not 0.
        batch_invariant: see `logprobs_of`.
    """
    places = np.where(which, np.arange(len(which)), -1).astype(np.int32)
    if not runs_kernels(logits):
        places = np.flatnonzero(which).astype(np.int32)
        rows = torch.from_numpy(places).to(logits.device)
        distributions = Distributions(*(part[rows.long()] for part in distributions))
        tokens = tokens[rows.long()]
    return Scored(
        places, logprobs_of(logits, tokens, 0, distributions, batch_invariant=batch_invariant)
    )


def report_draws(
    logits: torch.Tensor,
    drawn: Drawn,
    controls: Controls,
    places: Int32,
    batch_invariant: bool = False,
) -> tuple[list[Scored], Left | None]:
    """The reports on draws of rows with controls.

    Args:
        logits: [n, V], the model's.
        drawn: the draws.
        controls: controls of the rows.
        places: [n] int32, their places among the rows that sample.
        batch_invariant: see `logprobs_of`.
    """
    reports = controls.reports
    is_asked, is_raw = reports.num_logprobs >= 0, reports.modes == RAW
    sources = [(logits, is_asked)]
    has_own = drawn.logits is not logits  # else nothing has changed them
    if has_own:
        sources = [(logits, is_asked & is_raw), (drawn.logits, is_asked & ~is_raw)]
    scored = [
        _score(x, drawn, controls, which, places, batch_invariant)
        for x, which in sources
        if which.any()
    ]
    rows = np.flatnonzero(reports.masks).astype(np.int32)
    if not has_own or not len(rows):
        return scored, None
    return scored, Left(places[rows], *_left(drawn, rows))


def _score(
    logits: torch.Tensor,
    drawn: Drawn,
    controls: Controls,
    which: NDArray[np.bool_],
    places: Int32,
    batch_invariant: bool,
) -> Scored:
    """The log-probabilities of the rows `which`: [n], by their distributions of these logits."""
    reports, rows = controls.reports, np.flatnonzero(which).astype(np.int32)
    chosen = which[reports.label_rows]
    entries = (np.cumsum(which) - 1)[reports.label_rows[chosen]].astype(np.int32)
    tokens = reports.label_tokens[chosen]
    is_cut = (reports.modes[rows] == PROCESSED) & (drawn.least is not None)
    limits = np.where(is_cut, np.inf, -np.inf).astype(np.float32)
    index, divisors, least, *labels = upload(
        logits.device, rows, reports.divisors[rows], limits, entries, tokens
    )
    if drawn.least is not None:
        least = torch.minimum(least, drawn.least.to(logits.device)[index.long()])
    found = logprobs_of(
        logits,
        drawn.tokens.to(logits.device)[index.long()],
        int(reports.num_logprobs[rows].max()),
        Distributions(index, divisors, least),
        Labels(*labels) if len(tokens) else None,
        batch_invariant,
    )
    return Scored(places[rows], found, entries, tokens)


def _left(drawn: Drawn, rows: Int32) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that could have been drawn in these rows: `Left.listed` and `Left.words`."""
    x, V = drawn.logits, drawn.logits.shape[1]
    [index] = upload(x.device, rows)
    least = torch.full((len(rows),), -torch.inf, dtype=torch.float32, device=x.device)
    if drawn.least is not None:
        least = drawn.least[index.long()]
    W = num_words(V)
    count = min(MAX_LISTED, W - 1)
    if runs_kernels(x):
        from nanovllm.kernels.sampling.controls import left, listed

        words = left(x, index, least)
        return listed(words, count), words
    own = x[index.long()]
    is_left = (own >= least[:, None]) & (own > -torch.inf)
    bits = torch.nn.functional.pad(is_left, (0, 32 * W - V)).cpu().numpy()
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    return _listed(is_left, count), words


def _listed(is_left: torch.Tensor, count: int) -> torch.Tensor:
    """`Left.listed` of is_left: [m, V] bool, for `count` ids."""
    places = is_left.cumsum(1, dtype=torch.int32)  # counted from 1
    found = torch.zeros(len(places), 1 + count, dtype=torch.int32, device=places.device)
    found[:, 0] = places[:, -1]
    rows, ids = (is_left & (places <= count)).nonzero().unbind(1)
    found[rows, places[rows, ids].long()] = ids.to(torch.int32)
    return found
