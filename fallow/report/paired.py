"""Whether two methods differ, by the seeds that both were run with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LEAST, EXACT, LONGEST = 3, 6, 20  # seeds: for a test at all, for the exact one, and up to which all flips are counted
WORDS = f"two-sided paired t-test with {LEAST} to {EXACT - 1} seeds, exact sign-flip permutation test with {EXACT} or more"


@dataclass(frozen=True)
class Difference:
    """The mean difference over the seeds that both have, and how likely one as large is if there is none."""

    mean: float
    n: int
    p: float | None

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" + ("" if self.p is None else f" (p {shown(self.p)})")


def shown(p: float) -> str:
    """
    >>> shown(0.0004), shown(0.0312), shown(0.25)
    ('< 0.001', '0.031', '0.25')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Of values by seed, the first's less the other's; None where they have no seed in common."""
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    gaps = np.array([one[seed] - other[seed] for seed in seeds])
    return Difference(float(gaps.mean()), len(gaps), p_value(gaps))


def p_value(gaps: np.ndarray) -> float | None:
    """Two-sided, that the true mean is 0; None where there are too few, or all are the same and say nothing of their spread."""
    n = len(gaps)
    if n < LEAST:
        return None
    if EXACT <= n <= LONGEST:
        return flips(gaps)
    return t_test(gaps)


def t_test(gaps: np.ndarray) -> float | None:
    """Student's, of one sample."""
    from scipy.special import stdtr

    spread = float(gaps.std(ddof=1))
    if spread <= 1e-12 * float(np.abs(gaps).max(initial=0.0)):
        return None
    t = float(gaps.mean()) / (spread / math.sqrt(len(gaps)))
    return float(2 * stdtr(len(gaps) - 1, -abs(t)))


def flips(gaps: np.ndarray) -> float:
    """The share of all ways to turn signs whose sum is at least as far from 0; ties within rounding count."""
    sums = np.zeros(1)
    for gap in gaps:
        sums = np.concatenate([sums + gap, sums - gap])
    seen = abs(float(gaps.sum()))
    return float(np.mean(np.abs(sums) >= seen - 1e-9 * max(1.0, float(np.abs(gaps).sum()))))
