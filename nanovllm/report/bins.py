"""`Bins`: the work of steps, summed over equal parts of a trace's time.

A trace may have millions of steps, a chart at most `NUM_BINS` points: the work of a step is spread
evenly over its time.
"""

from collections.abc import Sequence

import numpy as np

from nanovllm.report.reading import Engine, Floats, Trace

NUM_BINS = 240


class Bins:
    """Equal parts of the time from the first step to the end of the last.

    Amounts and values are lists of [steps] arrays, one per engine.

    Attributes:
        times: [bins] middle of each bin, in seconds.
        width: length of each bin, in seconds.
    """

    def __init__(self, trace: Trace) -> None:
        self._engines = trace.engines
        num_bins = min(NUM_BINS, max(len(each["seconds"]) for each in trace.engines))
        self.edges = np.linspace(0, trace.seconds, num_bins + 1)
        self.times: Floats = (self.edges[1:] + self.edges[:-1]) / 2
        self.width = float(self.edges[1])

    def column(self, name: str) -> list[Floats]:
        """A column of each engine's steps."""
        return [each[name] for each in self._engines]

    def sums(self, amounts: Sequence[Floats]) -> Floats:
        """[bins] sums of amounts over all engines."""
        pairs = zip(self._engines, amounts, strict=True)
        return np.sum([self.spread(*pair) for pair in pairs], 0)

    def rates(self, name: str) -> Floats:
        """[bins] amounts of a column per second."""
        return self.sums(self.column(name)) / self.width

    def levels(self, name: str) -> Floats:
        """[bins] mean of a column that counts things at a time (running sequences), summed over all
        engines.
        """
        amounts = [each[name] * each["seconds"] for each in self._engines]
        return self.sums(amounts) / self.width

    def shares(self, seconds: Sequence[Floats]) -> Floats:
        """[bins] share of the time that engines had requests; NaN where none had."""
        total = self.sums(self.column("seconds"))
        empty = np.full_like(total, np.nan)
        return np.divide(self.sums(seconds), total, out=empty, where=total > 0)

    def spread(self, engine: Engine, amount: Floats) -> Floats:
        """[bins] amounts of one engine's steps."""
        begin, done = engine["begin"], np.cumsum(amount)
        times = np.stack([begin, begin + engine["seconds"]], 1).ravel()
        sums = np.stack([done - amount, done], 1).ravel()
        return np.diff(np.interp(self.edges, np.maximum.accumulate(times), sums))
