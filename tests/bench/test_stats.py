"""The statistics of the rows: by hand, and by whether their intervals hold what they should as often as they say."""

import math
import random

import pytest

from vllm_moe_tune_plugin.bench import stats

DRAWS = 600


def test_median_and_spread() -> None:
    assert stats.median([5.0, 1.0, 3.0]) == 3.0
    assert stats.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0  # deviations 2, 1, 0, 1, 97


def test_ratios_are_taken_inside_a_round() -> None:
    # The machine is half as fast in the second round: inside a round that does not show.
    assert stats.paired_ratios([11.0, 13.0, 22.0, 26.0], [10.0, 10.0, 20.0, 20.0], 2) == pytest.approx([1.2, 1.2])


def test_confidence_is_reproducible_and_covers_the_median() -> None:
    draw = random.Random()
    samples = [[draw.gauss(1.1, 0.02) for _ in range(25)] for _ in range(DRAWS // 4)]
    intervals = [stats.confidence(some) for some in samples]

    assert [stats.confidence(some) for some in samples[:5]] == intervals[:5]
    covered = sum(low <= 1.1 <= high for low, high in intervals) / len(intervals)
    assert covered > 0.85


def test_mean_ratio_by_hand() -> None:
    mean, low, high = stats.mean_ratio([1.0, 2.0, 4.0])
    # In powers of 2: mean 1, standard deviation 1, of three: t is 4.303.
    half = 2 ** (4.303 / math.sqrt(3))
    assert (mean, low, high) == pytest.approx((2.0, 2.0 / half, 2.0 * half))
    assert stats.mean_ratio([1.25]) == pytest.approx((1.25, 0.0, math.inf))


@pytest.mark.parametrize("pairs", [3, 16, 40])
def test_mean_ratio_covers_the_truth_as_often_as_it_says(pairs: int) -> None:
    draw = random.Random()
    intervals = [stats.mean_ratio([1.05 * math.exp(draw.gauss(0, 0.01)) for _ in range(pairs)]) for _ in range(DRAWS)]
    covered = sum(low <= 1.05 <= high for _, low, high in intervals) / DRAWS
    # 95 % within five standard errors; the range of three pairs would cover 75 %.
    assert 0.90 < covered < 0.995
