"""`Histogram`: the distribution of durations, in memory that does not grow."""

import math
from bisect import bisect_left
from itertools import accumulate

# Upper bounds of the buckets, in seconds: 10 µs to 1000 s, each 4.7 % (a fiftieth of a decade)
# above the one before it, and infinity.
BOUNDS = (*(10 ** (i / 50) for i in range(-5 * 50, 3 * 50 + 1)), math.inf)


class Histogram:
    """Counts of durations in seconds, by the buckets of `BOUNDS`.

    Attributes:
        sum: sum of all durations, in seconds.
        max: longest duration, in seconds; 0 before the first.
    """

    def __init__(self) -> None:
        self.sum = self.max = 0.0
        self._counts = [0] * len(BOUNDS)

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
        self.max = max(self.max, seconds)

    def merge(self, other: "Histogram") -> None:
        """Add the counts of another histogram."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum
        self.max = max(self.max, other.max)

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self._counts)

    @property
    def mean(self) -> float | None:
        """The exact mean; None before the first duration."""
        return self.sum / self.count if self.count else None

    def percentile(self, p: float) -> float | None:
        """The least duration that at least `p` percent do not exceed; None before the first.

        Rounded up to the bound of its bucket or to `max`: never too small, and too large by less
        than 4.8 % between 10 µs and 1000 s. Shorter ones read as at most 10 µs, longer ones as
        `max`.
        """
        assert 0 < p <= 100, f"{p} is not a percentage"
        cumulative = list(accumulate(self._counts))
        if not cumulative[-1]:
            return None
        bucket = bisect_left(cumulative, math.ceil(p * cumulative[-1] / 100))
        return min(BOUNDS[bucket], self.max)

    def as_dict(self) -> dict[str, int | float | None]:
        """A summary, for JSON. All values but `count` are None before the first duration."""
        return {
            "count": self.count,
            "mean": self.mean,
            "p50": self.percentile(50),
            "p90": self.percentile(90),
            "p99": self.percentile(99),
            "max": self.max if self.count else None,
        }
