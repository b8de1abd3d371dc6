"""Statistics of sweeps, against closed forms, counting, and published numbers."""

import itertools
import math

import numpy as np
import pytest

from vit_jax.sweep import statistics

# Paired differences of a pilot, in points: P4S2 - P2S2 on digits, 40 epochs.
PILOT = [5.00, 5.83, 2.22, 3.89, 6.11, 5.28]


def test_summary_by_hand():
  found = statistics.summary([1.0, 2.0, 3.0, 4.0])
  assert found[:2] == (4, 2.5)
  assert found.sd == pytest.approx(math.sqrt(5 / 3))
  # t of 3 degrees of freedom at 97.5 %: 3.182446.
  assert found.high - 2.5 == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)
  assert math.isnan(statistics.summary([1.0]).low)


def test_a_known_pilot():
  found = statistics.paired(PILOT, [0.0] * 6, band=0.25)
  assert found.mean == pytest.approx(4.72, abs=0.005)
  assert (found.low, found.high) == pytest.approx((3.35, 5.56), abs=0.12)
  assert found.p == 2 / 2**6
  assert found.wins == 1 and found.wins_low > 0.6


@pytest.mark.parametrize("seed", range(4))
def test_sign_flips_are_all_counted(seed):
  draw = np.random.default_rng(seed)
  differences = np.round(draw.normal(0.3, 1, 7), 2)
  means = [
    abs(round(float(np.mean(differences * signs)), 12))
    for signs in itertools.product((1, -1), repeat=7)
  ]
  observed = abs(round(float(differences.mean()), 12))
  expected = sum(mean >= observed for mean in means) / len(means)
  found = statistics.paired(differences, np.zeros(7), band=0.1)
  assert found.p == pytest.approx(expected, abs=1e-12)


def test_false_alarms_are_as_rare_as_stated():
  """Of pairs without a difference, the test rejects at most 5 %."""
  draw = np.random.default_rng(0)
  alarms = sum(
    statistics._sign_flip(draw.normal(0, 1, 8)) <= statistics.ALPHA for _ in range(400)
  )
  assert 4 <= alarms <= 36  # 20 expected; five standard deviations are 22


def test_equal_pairs_are_no_error():
  same = statistics.paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], band=0.25)
  assert (same.mean, same.low, same.high, same.p, same.wins) == (0, 0, 0, 1, 0.5)
  assert same.equivalent_p == 0


def test_holm_by_hand():
  assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
  assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
  assert statistics.holm([]) == []


@pytest.mark.parametrize(
  "sd, effect, pairs",
  [(0.25, 0.5, 6), (0.25, 0.25, 18), (0.4, 0.5, 13), (0.4, 0.25, 43)],
)
def test_pairs_needed(sd, effect, pairs):
  """Two independent arms with this spread of their own."""
  assert abs(statistics.pairs_needed(effect, sd * math.sqrt(2)) - pairs) <= 1
  least = statistics.detectable(sd * math.sqrt(2), pairs)
  assert least <= effect * 1.06


def test_power_is_how_often_it_is_found():
  draw = np.random.default_rng(1)
  x = draw.normal(0.5, 0.6, (4000, 9))
  t = x.mean(1) / (x.std(1, ddof=1) / 3)
  found = float(np.mean(np.abs(t) > 2.306004))
  assert statistics.power(0.5, 0.6, 9) == pytest.approx(found, abs=0.03)


@pytest.mark.parametrize(
  "differences, words",
  [
    ([5.0, 5.1, 4.9], "nothing can be claimed: 3 pairs"),
    (PILOT, "higher by 4.72"),
    ([-x for x in PILOT], "lower by 4.72"),
    ([0.01, -0.02, 0.015, -0.01, 0.0, 0.02, -0.01, 0.01], "the same within 0.25"),
    ([1.0, -1.2, 0.9, -0.7, 1.1, -0.9, 0.2, 0.1], "undecided: 8 pairs find"),
  ],
)
def test_what_is_claimed(differences, words):
  found = statistics.paired(differences, [0.0] * len(differences), band=0.25)
  assert statistics.verdict(found, found.p, 0.25).startswith(words)


def test_a_correction_can_take_a_claim_back():
  found = statistics.paired(PILOT, [0.0] * 6, band=0.25)
  assert "undecided" in statistics.verdict(
    found, statistics.holm([found.p] * 2)[0], 0.25
  )
