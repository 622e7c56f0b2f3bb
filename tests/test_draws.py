"""Keyed draws: known bits, no state, uniform, the same in any batch size and order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fallow import draws


def splitmix(state: int) -> int:
    """The published generator's n-th output, in Python's integers."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_bits_are_splitmix64() -> None:
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    for k in (0, 1, 2**62 + 12345):
        found = draws.bits(k, torch.arange(50)).numpy().view(np.uint64)
        assert found.tolist() == [splitmix(k + (n + 1) * 0x9E3779B97F4A7C15) for n in range(50)]
        assert draws.host_bits(k, np.arange(50)).view(np.uint64).tolist() == found.tolist()


def test_a_draw_is_a_function_of_key_and_number() -> None:
    k = draws.key(0, "shuffle", 3)
    whole = draws.bits(k, torch.arange(100))
    assert torch.equal(whole, draws.bits(k, torch.arange(100)))
    assert torch.equal(whole[[7, 3, 99]], draws.bits(k, torch.tensor([7, 3, 99])))
    keys = torch.tensor([draws.key(0, i) for i in range(3)])
    table = draws.bits(keys[:, None], torch.arange(5))
    assert table.shape == (3, 5) and torch.equal(table[1], draws.bits(int(keys[1]), torch.arange(5)))


def test_draws_of_host_keys() -> None:
    """By numpy, a row for each lane, what `uniform` and `integers` draw lane by lane."""
    keys, lanes, high = torch.tensor([draws.key("host", k) for k in range(40)]), [0, 5, 70], [7, 1, 2**31 - 1]
    raw = [[splitmix(int(k) + (lane + 1) * 0x9E3779B97F4A7C15) for k in keys] for lane in lanes]
    assert draws.host_uniform(keys, lanes).tolist() == [[(z >> 11) * 2.0**-53 for z in row] for row in raw]
    assert draws.host_integers(keys, lanes, high).tolist() == [[((z >> 32) * h) >> 32 for z in row] for row, h in zip(raw, high)]
    for k, (lane, h) in enumerate(zip(lanes, high)):
        assert torch.equal(draws.host_uniform(keys, lanes)[k], draws.uniform(keys, lane))
        assert torch.equal(draws.host_integers(keys[::3], lanes, high)[k], draws.integers(keys[::3], lane, h))


def test_keys_tell_parts_apart() -> None:
    parts = [(0,), ("0",), (0, 0), ("00",), (1, 23), (12, 3), ("a", "bc"), ("ab", "c"), (0, "a", 1), (0, "a", -1)]
    assert len({draws.key(*p) for p in parts}) == len(parts)
    assert all(0 <= draws.key(*p) < 2**63 for p in parts)
    assert draws.key(0, "party", 1) == draws.key(0, "party", 1)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", range(5))
def test_uniform(seed: int) -> None:
    u = draws.uniform(draws.key(seed, "u"), torch.arange(100_000)).numpy()
    assert u.dtype == np.float64 and u.min() >= 0 and u.max() < 1
    assert chi_square(np.histogram(u, 100, (0, 1))[0]) < 165  # 99 degrees of freedom: exceeded once in 30,000
    pairs = (u[:-1] * 10).astype(int) * 10 + (u[1:] * 10).astype(int)  # neighbours are independent
    assert chi_square(np.bincount(pairs, minlength=100)) < 165
    whole = draws.integers(draws.key(seed, "i"), torch.arange(70_000), 7)
    assert chi_square(np.bincount(whole.numpy(), minlength=7)) < 30
    across = draws.uniform(torch.tensor([draws.key(seed, k) for k in range(20_000)]), 0).numpy()  # one draw of many keys
    assert chi_square(np.histogram(across, 50, (0, 1))[0]) < 95


def test_permutations() -> None:
    for size in (0, 1, 2, 10, 1000):
        assert sorted(draws.permutation(5, size).tolist()) == list(range(size))
    orders = [tuple(draws.permutation(draws.key(k), 3).tolist()) for k in range(6000)]
    counts = np.array([orders.count(o) for o in sorted(set(orders))])
    assert len(counts) == 6 and chi_square(counts) < 26


def test_the_host_generator() -> None:
    a, b, c = (draws.rng(k).random(4).tolist() for k in (1, 1, 2))
    assert a == b != c
