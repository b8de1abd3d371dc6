"""What can be claimed from a few seeds: intervals, paired tests, power (all by scipy).

Differences are paired by seed. A difference is claimed when the interval of the bootstrap
(BCa, Efron 1987) leaves 0 out and the exact sign-flip test, corrected for the number of
comparisons (Holm 1979), says so too. With n pairs that test cannot give less than
2 / 2^n, so that fewer than six never claim anything.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95  # of intervals
ALPHA = 1 - LEVEL
POWER = 0.8
EXACT_PAIRS = 16  # up to 2^16 sign flips are all tried, above that many are drawn
DRAWN = 99_999
RESAMPLES = 9_999


class Summary(NamedTuple):
  """Of one arm: mean, standard deviation (n - 1) and Student's interval of the mean."""

  n: int
  mean: float
  sd: float
  low: float
  high: float


class Paired(NamedTuple):
  """Of the differences a - b of pairs.

  Attributes:
    n: pairs.
    mean, sd: of the differences.
    low, high: BCa interval of the mean.
    p: of the two-sided sign-flip test.
    wins: P(a > b), ties half; `wins_low`, `wins_high`: its Jeffreys interval.
    equivalent_p: that the difference lies within the band (two one-sided t-tests,
      Schuirmann 1987).
    detectable: the difference that so many pairs find with 80 %.
  """

  n: int
  mean: float
  sd: float
  low: float
  high: float
  p: float
  wins: float
  wins_low: float
  wins_high: float
  equivalent_p: float
  detectable: float


def summary(values: Sequence[float]) -> Summary:
  """Returns what is known of the mean; an interval needs two values."""
  values = np.asarray(values, np.float64)
  n, mean = len(values), float(values.mean())
  if n < 2:
    return Summary(n, mean, math.nan, math.nan, math.nan)
  sd = float(values.std(ddof=1))
  half = float(stats.t.ppf(1 - ALPHA / 2, n - 1)) * sd / math.sqrt(n)
  return Summary(n, mean, sd, mean - half, mean + half)


def paired(a: Sequence[float], b: Sequence[float], band: float) -> Paired:
  """Compares two arms pair by pair.

  Args:
    a, b: values of the same seeds, in the same order; at least two.
    band: differences up to this count as none.
  """
  differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
  n, mean = len(differences), float(differences.mean())
  sd = float(differences.std(ddof=1))
  wins = float((differences > 0).sum() + 0.5 * (differences == 0).sum())
  wins_low, wins_high = stats.beta.interval(LEVEL, wins + 0.5, n - wins + 0.5)
  return Paired(
    n,
    mean,
    sd,
    *_bca(differences),
    _sign_flip(differences),
    wins / n,
    float(wins_low),
    float(wins_high),
    _equivalent(differences, band),
    detectable(sd, n),
  )


def _bca(differences):
  if np.ptp(differences) == 0:  # no resampling changes the mean
    return float(differences[0]), float(differences[0])
  found = stats.bootstrap(
    (differences,),
    np.mean,
    confidence_level=LEVEL,
    n_resamples=RESAMPLES,
    method="BCa",
    rng=np.random.default_rng(0),
  )
  return tuple(map(float, found.confidence_interval))


def _sign_flip(differences):
  """Returns the p-value of the mean under flips of the signs of pairs."""
  # Sums of the same numbers in another order must not differ by rounding.
  rounded = np.round(differences, 12)
  exact = len(rounded) <= EXACT_PAIRS
  found = stats.permutation_test(
    (rounded,),
    lambda x, axis: np.abs(np.round(np.mean(x, axis=axis), 12)),
    permutation_type="samples",
    alternative="greater",
    n_resamples=np.inf if exact else DRAWN,
    vectorized=True,
    rng=np.random.default_rng(0),
  )
  return float(found.pvalue)


def _equivalent(differences, band):
  if np.ptp(differences) == 0:
    return 0.0 if abs(differences[0]) < band else 1.0
  above = stats.ttest_1samp(differences, -band, alternative="greater").pvalue
  below = stats.ttest_1samp(differences, band, alternative="less").pvalue
  return float(max(above, below))


def holm(p_values: Sequence[float]) -> list[float]:
  """Returns p-values corrected for their number (Holm 1979)."""
  order = np.argsort(p_values, kind="stable")
  corrected, least = [0.0] * len(p_values), 0.0
  for place, index in enumerate(order):
    least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
    corrected[index] = least
  return corrected


def power(effect: float, sd: float, n: int) -> float:
  """Returns how often a paired t-test of n differences finds a mean of `effect`."""
  if n < 2:
    return 0.0
  if sd == 0:
    return 1.0 if effect else ALPHA
  limit, shift = stats.t.ppf(1 - ALPHA / 2, n - 1), abs(effect) * math.sqrt(n) / sd
  upper = float(stats.nct.sf(limit, n - 1, shift))
  # From a shift of 5 the other tail is below 1e-8, and scipy's is NaN here and there; the
  # upper one is NaN where it is 1.
  lower = float(stats.nct.cdf(-limit, n - 1, shift)) if shift < 5 else 0.0
  return 1.0 if math.isnan(upper) else upper + lower


def pairs_needed(effect: float, sd: float, most: int = 10_000) -> int | None:
  """Returns the pairs that find a mean difference with 80 %; None: more than `most`."""
  low = high = 1
  while power(effect, sd, high) < POWER:
    if high >= most:
      return None
    low, high = high, min(2 * high, most)
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (low, middle) if power(effect, sd, middle) >= POWER else (middle, high)
  return high


def detectable(sd: float, n: int) -> float:
  """Returns the mean difference that n pairs find with 80 %."""
  if n < 2 or sd == 0:
    return math.inf if n < 2 else 0.0
  low, high = 0.0, 1e3 * sd
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (low, middle) if power(middle, sd, n) >= POWER else (middle, high)
  return high


def verdict(found: Paired, corrected_p: float, band: float, unit: str = "") -> str:
  """Returns in words what can be claimed of a difference a - b."""
  least = 2.0 / 2**found.n
  if least > ALPHA:
    return (
      f"nothing can be claimed: {found.n} pairs cannot give a p below {least:.3g}; six "
      "are the least, eight are better"
    )
  if corrected_p <= ALPHA and not found.low <= 0 <= found.high:
    which = "higher" if found.mean > 0 else "lower"
    return f"{which} by {abs(found.mean):.3g}{unit}"
  if found.equivalent_p <= ALPHA:
    return f"the same within {band:g}{unit}"
  return (
    f"undecided: {found.n} pairs find a difference of {found.detectable:.2g}{unit} or "
    f"more with {POWER:.0%}"
  )
