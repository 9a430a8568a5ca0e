"""The few statistics that the rows carry."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

RESAMPLES = 1000

#: Student's t by degrees of freedom from 1, two-sided 95 %.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float:
    """The median absolute deviation from the median."""
    middle = statistics.median(samples)
    return statistics.median(abs(sample - middle) for sample in samples)


def paired_ratios(above: Sequence[float], below: Sequence[float], group: int) -> list[float]:
    """One ratio for each ``group`` neighbouring samples of both, which were taken around the same time."""
    return [
        statistics.fmean(above[at : at + group]) / statistics.fmean(below[at : at + group])
        for at in range(0, len(above), group)
    ]


def confidence(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median; the same for the same samples."""
    draw = random.Random(len(samples))
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean and its 95 % interval by Student's t: for a few independent pairs, of which a bootstrap says nothing.

    One ratio alone has an interval from 0 to infinity.
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), 0.0, math.inf
    freedom = len(logs) - 1
    # Above the table its expansion around the normal distribution's 1.96 is good to three digits.
    quantile = STUDENT_95[freedom - 1] if freedom <= len(STUDENT_95) else 1.96 + 2.4 / freedom
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
