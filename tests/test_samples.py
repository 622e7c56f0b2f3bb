"""Samples, streams of batches, and plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fallow import draws
from fallow.data.samples import Samples, Stream
from fallow.errors import UserError
from fallow.methods.parts.batching import matched
from fallow.methods.plan import Plan, column

KEY = draws.key("test")


def some(n: int, start: int = 100) -> Samples:
    return Samples.of(np.arange(start, start + n), np.arange(n) % 3)


def sizes(stream: Stream) -> list[int]:
    return [len(p) for p in stream.positions(KEY, len(stream))]


# -- samples -------------------------------------------------------------------------------------------------------------
def test_samples_are_immutable_and_their_methods_give_new_ones() -> None:
    s = some(5)
    named = s.label(torch.tensor([4, 3, 2, 1, 0]), trust=torch.linspace(0, 1, 5))
    assert len(s) == 5 and s.y is not None and s.y.tolist() == [0, 1, 2, 0, 1]
    assert named.y is not None and named.y.tolist() == [4, 3, 2, 1, 0] and named.y.dtype == np.int64
    chosen = named.where(torch.tensor([True, False, False, True, False]))
    assert chosen.rows.tolist() == [100, 103] and chosen.index.tolist() == [0, 3]
    assert chosen.y is not None and chosen.y.tolist() == [4, 1] and chosen.columns["trust"].tolist() == [0.0, 0.75]
    assert s.having(a=np.arange(5), b=None).columns.keys() == {"a"}
    with pytest.raises(AttributeError):
        s.rows = np.zeros(1)  # type: ignore[misc]


def test_sums() -> None:
    both = some(2) + some(3, 200)
    assert both.rows.tolist() == [100, 101, 200, 201, 202] and both.y is not None and both.y.tolist() == [0, 1, 0, 1, 2]
    assert (some(2) + Samples.of(np.arange(2))).y is None
    mixed = some(2).having(a=[1, 2], b=[3, 4]) + some(1).having(a=[9])
    assert mixed.columns["a"].tolist() == [1, 2, 9] and "b" not in mixed.columns


def test_at_least() -> None:
    assert [len(some(n).at_least(8)) for n in (0, 1, 3, 8, 9)] == [0, 8, 12, 8, 9]  # doubled, never cut
    assert some(3).at_least(8).rows.tolist() == [100, 101, 102] * 4


# -- streams -------------------------------------------------------------------------------------------------------------
def test_tails() -> None:
    assert sizes(some(10).batches(4, "weak", epochs=1)) == [4, 4, 2]
    assert sizes(some(10).batches(4, "weak", epochs=2)) == [4, 4, 2, 4, 4, 2]
    assert sizes(some(9).batches(4, "weak", epochs=1)) == [4, 4, 1]  # of one sample too
    assert sizes(some(8).batches(4, "weak", epochs=1)) == [4, 4]
    assert sizes(some(10).batches(4, "weak", epochs=2, tail="drop")) == [4, 4, 4, 4]
    assert sizes(some(3).batches(4, "weak", epochs=1)) == [3]
    assert sizes(some(10).batches(4, "weak", epochs=2, tail="wrap")) == [4] * 6
    assert sizes(some(10).batches(None, "weak", epochs=2)) == [10, 10]
    assert sizes(some(10).batches(4, "weak", steps=5)) == [4, 4, 2, 4, 4]


def test_wrapping_fills_from_the_start_of_the_pass() -> None:
    for n, size in ((10, 4), (8, 4), (3, 8)):
        kept, wrapped = (some(n).batches(size, "weak", epochs=2, tail=tail) for tail in ("keep", "wrap"))
        per_pass = -(-n // size)
        for p in range(2):
            order, filled = (np.concatenate(s.positions(KEY, 2 * per_pass)[p * per_pass : (p + 1) * per_pass]).tolist() for s in (kept, wrapped))
            assert filled == (order * size)[: per_pass * size]


def test_a_chain_of_passes_leaves_nothing_out() -> None:
    """Endless permutations one behind the other: batches of one size, the first of which goes on where the last pass ended."""
    for n, size in ((10, 4), (8, 4), (3, 8)):
        stream = some(n).batches(size, "weak", steps=9, tail="chain")
        run = np.concatenate(stream.positions(KEY, 9)).tolist()
        assert sizes(stream) == [size] * 9
        assert all(sorted(run[a : a + n]) == list(range(n)) for a in range(0, 9 * size - n + 1, n))
    assert sizes(some(10).batches(4, "weak", epochs=1, tail="chain")) == [4, 4]


def test_drop_on_a_small_set_draws_with_replacement() -> None:
    parts = some(3).batches(8, "weak", steps=4, tail="drop").positions(KEY, 4)
    assert [len(p) for p in parts] == [8] * 4 and {int(i) for p in parts for i in p} == {0, 1, 2}


@pytest.mark.parametrize(("epochs", "batches"), [(0.001, 1), (0.1, 1), (0.34, 2), (0.5, 2), (2 / 3, 2), (1, 3), (1.5, 6), (2, 6), (2.01, 9)])
def test_fractional_epochs(epochs: float, batches: int) -> None:
    """Below 1: a share of the batches, rounded up; above: whole passes, rounded up (6.9, 13.2)."""
    assert len(some(10).batches(4, "weak", epochs=epochs)) == batches


def test_passes_are_disjoint_and_shuffled_anew() -> None:
    parts = some(10).batches(4, "weak", epochs=3).positions(KEY, 9)
    passes = [np.concatenate(parts[i : i + 3]) for i in (0, 3, 6)]
    assert all(sorted(p.tolist()) == list(range(10)) for p in passes)
    assert len({tuple(p.tolist()) for p in passes}) == 3
    dropped = np.concatenate(some(10).batches(4, "weak", epochs=1, tail="drop").positions(KEY, 2))
    assert len(set(dropped.tolist())) == 8
    straight = some(10).batches(4, "weak", epochs=1, shuffle=False).positions(KEY, 3)
    assert np.concatenate(straight).tolist() == list(range(10))


def test_the_key_decides() -> None:
    stream = some(50).batches(8, "weak", epochs=1)
    one, again, other = (np.concatenate(stream.positions(k, 7)).tolist() for k in (KEY, KEY, KEY + 1))
    assert one == again != other
    assert one == np.concatenate(stream.positions(KEY, 7)[:3] + stream.positions(KEY, 7)[3:]).tolist()
    assert [p.tolist() for p in stream.positions(KEY, 3)] == [p.tolist() for p in stream.positions(KEY, 7)[:3]]  # shorter: a beginning


def test_replacement() -> None:
    parts = some(5).batches(50, "weak", steps=40, replace=True).positions(KEY, 40)
    drawn = np.concatenate(parts)
    assert len(drawn) == 40 * 5 and set(drawn.tolist()) == set(range(5))
    counts = np.bincount(drawn)
    assert ((counts - 40) ** 2 / 40).sum() < 25  # 4 degrees of freedom


def test_sizes_as_another_stream() -> None:
    fix = some(10).batches(4, "weak", epochs=2)
    mix = some(7, 300).batches(fix, "weak")
    assert len(mix) == len(fix) and not mix.endless
    assert [len(p) for p in mix.positions(KEY, 6)] == [4, 4, 2, 4, 4, 2]
    run = np.concatenate(mix.positions(KEY, 6))
    assert sorted(run[:7].tolist()) == sorted(run[7:14].tolist()) == list(range(7))  # one permutation after another
    free = some(7, 300).batches(fix, "weak", replace=True).positions(KEY, 6)
    assert [len(p) for p in free] == [4, 4, 2, 4, 4, 2]


def test_endless_and_absent() -> None:
    endless = some(10).batches(4, "weak")
    assert endless.endless and endless and [len(p) for p in endless.positions(KEY, 5)] == [4, 4, 2, 4, 4]
    absent = some(0).batches(4, "weak", epochs=1)
    assert not absent and len(absent) == 0 and absent.sizes_of_pass() == []


def test_an_unknown_view() -> None:
    with pytest.raises(UserError, match="'strnog' is no view; views are plain, labelled, weak, strong"):
        some(3).batches(2, "strnog")
    assert some(3).batches(2, "weak", other="weak").views == {"weak": "weak", "other": "weak"}


# -- plans ---------------------------------------------------------------------------------------------------------------
def test_a_plan_is_as_long_as_its_shortest_stream() -> None:
    short, long, endless = some(8).batches(4, "weak", epochs=1), some(40).batches(4, "weak", epochs=1), some(3).batches(2, "weak")
    assert len(Plan(x=short, u=long)) == 2 and len(Plan(u=long, x=endless)) == 10
    assert len(Plan(x=some(0).batches(4, "weak", epochs=1), u=long)) == 10  # an absent stream does not count
    assert len(Plan(x=some(0).batches(4, "weak"))) == 0 and len(Plan()) == 0 and len(Plan(lam=0.5)) == 0


def test_plans_add_up() -> None:
    one = Plan(x=some(8).batches(4, "weak", epochs=1))
    assert len(one + one) == 4 and len(sum((one for _ in range(5)), Plan())) == 10
    assert len((one + one).segments) == 2 and len(one) == 2
    more = (one + one).having(lam=0.5, u=some(4).batches(4, "weak", epochs=1), nothing=None)
    assert len(more) == 2 and all(set(s.numbers) == {"lam"} and set(s.streams) == {"x", "u"} for s in more.segments)
    assert not one.segments[0].numbers


def test_a_plan_without_an_end() -> None:
    with pytest.raises(UserError, match="every stream of a plan is endless, so the plan has no end; give one of them `epochs` or `steps`"):
        len(Plan(x=some(8).batches(4, "weak"), u=some(9).batches(4, "weak")))
    with pytest.raises(UserError, match="endless"):
        len(Plan(x=some(8).batches(4, "weak"), u=some(0).batches(4, "weak", epochs=1)))


def test_columns() -> None:
    assert column("lam", 0.5, 3).tolist() == [0.5] * 3
    assert column("n", 2, 3).dtype == torch.int64 and column("x", [1.0, 2, 3, 4], 3).tolist() == [1, 2, 3]
    assert column("x", torch.ones(3, 2, dtype=torch.float64), 3).dtype == torch.float32
    assert column("flag", np.array([True, False]), 2).tolist() == [1.0, 0.0]
    with pytest.raises(UserError, match="column 'lam' of a plan has 2 entries for 3 steps; make it as long as the plan"):
        column("lam", [0.5, 0.5], 3)


def test_matched_batches() -> None:
    assert matched(55, 545, 10) == (6, 91) and matched(3, 100, 10) == (1, 100)
    assert matched(20, 480, 10, floor=True) == (4, 120) and matched(50, 450, 10, floor=True) == (5, 90)
    assert matched(20, 2000, 10, floor=True) == (4, 125)
