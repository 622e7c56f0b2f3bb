"""Chapter 4: every worked example, the authors' golden splits, the published statistics, and properties of them all."""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fallow.data import dealing, dirichlets, skews
from fallow.data.dealing import Deal, Pool, ShardDraw, TypeDraw, deal
from fallow.data.dirichlets import ClientDraw, EqualDraw
from fallow.data.partitions import PARTITIONS, PartitionError, parse
from fallow.data.skews import largest_skew, skew, skew_counts
from fallow.errors import UserError

warnings.filterwarnings("ignore", message="missing_class")

EVERY = [
    "iid", "iid:stratified", "iid:stratified,leftover=spread", "iid:spread", "shards:2,allow_uneven=true",
    "shards:2,allow_uneven=true,distinct=true,shuffle=false", "dirichlet-capped:0.3", "dirichlet-capped:0.5,shuffle=true",
    "dirichlet-capped:100,min_size=3", "dirichlet-equal:0.5", "dirichlet-equal:0.1,fill=proportional,last=dirichlet",
    "dirichlet-client:0.1", "dirichlet-client:1,concentration=total", "dirichlet-pairs:0.5", "skew:0", "skew:0.4", "skew:0.7,drop=true",
    "skew:1,r_kind=nominal", "skew:0.6,rule=a2", "class-pairs", "batch-non-iid,types=generic",
    "batch-non-iid,types=generic,short=refill",
]  # fmt: skip
EQUAL = ("iid", "dirichlet-equal", "dirichlet-client", "skew:")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def balanced(samples: int, classes: int = 10) -> np.ndarray:
    return np.repeat(np.arange(classes), samples // classes)


def pool_of(counts, clients: int) -> Pool:
    return Pool(np.repeat(np.arange(len(counts)), counts), len(counts), clients)


def lists(split) -> list[list[int]]:
    return [part.tolist() for part in split.parts]


def count(split, pool: Pool) -> np.ndarray:
    return np.stack([np.bincount(pool.labels[part], minlength=pool.classes) for part in split.parts])


def brute_skew(counts) -> float:
    """R by its definition, pair by pair."""
    mixes = [row / row.sum() for row in np.asarray(counts, float)]
    pairs = [0.5 * np.abs(a - b).sum() for a, b in itertools.combinations(mixes, 2)]
    return float(np.mean(pairs)) if pairs else 0.0


# --- properties of every partition


@st.composite
def pools(draw):
    classes = draw(st.integers(2, 7))
    counts = draw(st.lists(st.integers(6, 60), min_size=classes, max_size=classes))
    clients = draw(st.integers(max(1, (classes + 1) // 2), 6))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(sum(counts))
    return Pool(np.repeat(np.arange(classes), counts)[order], classes, clients)


@pytest.mark.parametrize("text", EVERY)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(pool=pools(), seed=st.integers(0, 10**6))
def test_every_partition_hands_each_sample_out_once(text, pool, seed):
    partition = parse(text)
    try:
        split = partition(pool, rng(seed))
    except PartitionError as error:
        assert error.code in {
            "class_too_small", "r_not_reached", "r_needs_drop", "r_impossible", "dirichlet_min_size",
            "min_size_impossible", "fedmatch_types_need_10_classes", "shards_too_many", "shards_not_distinct",
        }, error  # fmt: skip
        return
    assert len(split.parts) == pool.clients
    everything = np.concatenate([*split.parts, split.dropped])
    assert sorted(everything.tolist()) == list(range(len(pool.labels)))  # disjoint and complete
    sizes = np.array([len(part) for part in split.parts])
    if (text.startswith(EQUAL) and "rule=a2" not in text) or "short=refill" in text:
        assert sizes.max() - sizes.min() <= ("spread" in text) * (1 if text == "iid:spread" else pool.classes)
    if text in ("iid", "dirichlet-equal:0.5", "dirichlet-client:0.1", "skew:0.4"):
        assert set(sizes) == {pool.each}
    if "capped" in text:
        assert sizes.min() >= (partition.options["min_size"] or dirichlets.default_min_size(pool))
    if text in ("iid:spread", "class-pairs", "skew:0.6,rule=a2", "iid:stratified,leftover=spread") or "capped" in text:
        assert not len(split.dropped)
    counts = count(split, pool)
    if sizes.min() > 0:
        assert skew(counts) == pytest.approx(brute_skew(counts), abs=1e-12)
        assert skew(counts) <= largest_skew(pool.clients, pool.classes) + 1e-12
    if text in ("skew:0", "skew:0.4", "skew:0.7,drop=true"):
        assert abs(brute_skew(counts) - partition.options["r"]) <= 0.01 + 1e-12
    if text == "iid:stratified":
        assert skew(counts) == 0
    if "shards" in text:
        assert (counts > 0).sum(1).max() <= 2
        if "distinct" in text:
            assert (counts > 0).sum(1).min() == 2


@pytest.mark.parametrize("text", EVERY)
def test_the_seed_alone_decides(text):
    pool = Pool(balanced(720, 6), 6, 6)

    def made(seed):
        return np.concatenate([np.append(part, -1) for part in parse(text)(pool, rng(seed)).parts]).tobytes()

    assert made(3) == made(3)
    assert made(3) != made(4)


@pytest.mark.parametrize("text", EVERY)
@pytest.mark.parametrize("classes", [10, 100])
def test_fast_at_full_size(text, classes):
    if classes == 100 and "skew:0.7" in text:
        pytest.skip("same path")
    pool = Pool(np.tile(np.arange(classes), 50_000 // classes), classes, 100)
    start = time.process_time()
    parse(text)(pool, rng())
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1, 100])
@pytest.mark.parametrize("name", ["dirichlet-capped", "dirichlet-equal", "dirichlet-client"])
def test_bounded_for_every_alpha(name, alpha):
    pool = Pool(balanced(5000), 10, 20)
    start = time.process_time()
    try:
        split = parse(f"{name}:{alpha}")(pool, rng(1))
        assert sum(map(len, split.parts)) + len(split.dropped) == 5000
    except PartitionError as error:
        assert error.code == "dirichlet_min_size" and alpha < 0.05
        assert "smallest seen" in str(error)
    assert time.process_time() - start < 2


def test_shuffled_samples_leave_the_distribution_of_counts():
    """I6, on the mean R of 20 seeds."""
    for text in ("dirichlet-capped:0.3", "dirichlet-equal:0.3", "dirichlet-client:0.3"):
        means = []
        for order in (np.arange(2000), np.random.default_rng(5).permutation(2000)):
            pool = Pool(balanced(2000)[order], 10, 10)
            means.append(np.mean([skew(count(parse(text)(pool, rng(seed)), pool)) for seed in range(20)]))
        assert abs(means[0] - means[1]) < 0.05, text


# --- 4.1


def test_iid_example():
    pool, order = Pool(np.zeros(7, int), 1, 3), np.array([4, 0, 6, 2, 5, 1, 3])
    split = dealing.apply_iid(pool, order)
    assert lists(split) == [[4, 0], [6, 2], [5, 1]] and split.dropped.tolist() == [3]
    split = dealing.apply_spread(pool, order)
    assert lists(split) == [[4, 0], [6, 2], [5, 1, 3]] and not len(split.dropped)


def test_iid_sizes():
    svhn = parse("iid")(Pool(np.zeros(72257, int), 10, 100), rng())
    assert {len(part) for part in svhn.parts} == {722} and len(svhn.dropped) == 57
    with pytest.raises(PartitionError) as caught:
        parse("iid:stratified")(pool_of([50, 3], 5), rng())
    assert caught.value.code == "class_too_small"
    spread = parse("iid:stratified,leftover=spread")(pool_of([7, 8], 5), rng())
    assert [len(part) for part in spread.parts] == [3, 3, 3, 3, 3]  # 2 leftovers to 0, 1, then 3 to 2, 3, 4


@pytest.mark.parametrize("each, expected", [(4900, 0.0232), (450, 0.0824)])
def test_iid_is_not_r_zero(each, expected):
    clients = 10 if each == 4900 else 100
    pool = Pool(balanced(each * clients), 10, clients)
    r = np.mean([skew(count(parse("iid")(pool, rng(seed)), pool)) for seed in range(5)])
    assert r == pytest.approx(expected, rel=0.08)
    assert r == pytest.approx(10 * np.sqrt(0.09 / (np.pi * each)), rel=0.1)


# --- 4.2


def test_shards_example():
    pool = pool_of([5, 5, 5, 5], 4)
    slots = np.array([[0, 0], [1, 2], [3, 1], [2, 3]])
    split = dealing.apply_shards(pool, ShardDraw(np.arange(20), slots, [np.arange(2)] * 4))
    assert lists(split) == [[0, 1, 4, 2, 3], [5, 6, 9, 10, 11, 14], [15, 16, 19, 7, 8], [12, 13, 17, 18]]


def test_shards_repeat_as_often_as_they_should():
    pool = Pool(balanced(2000), 10, 100)
    alone = [(count(parse("shards:2")(pool, rng(s)), pool) > 0).sum(1) == 1 for s in range(30)]
    assert np.mean(alone) == pytest.approx(19 / 199, abs=0.015)
    once = parse("shards:2,distinct=true")(pool, rng())
    assert ((count(once, pool) > 0).sum(1) == 2).all()
    assert ((count(once, pool) == 10).sum(0) == 20).all()  # each class in exactly h slots


@pytest.mark.parametrize(
    "text, counts, clients, code",
    [("shards:2", [50] * 10, 7, "shards_uneven"), ("shards:3", [50, 50], 4, "shards_too_many"),
     ("shards:2", [50, 3], 4, "class_too_small"), ("shards:0", [50, 50], 4, "shards_too_many")],
)  # fmt: skip
def test_shards_errors(text, counts, clients, code):
    with pytest.raises(PartitionError) as caught:
        parse(text)(pool_of(counts, clients), rng())
    assert caught.value.code == code


# --- 4.3, 14.5


def capped(pool, shares, order):
    return Deal(*deal(pool.labels, dirichlets.capped_counts(pool, shares), order))


def test_capped_examples():
    shares = np.array([[1, 0, 0], [0.5, 0.3, 0.2], [0.2, 0.4, 0.4]])
    split = capped(pool_of([4, 4, 4], 3), shares, np.arange(12))
    assert lists(split) == [[0, 1, 2, 3], [4, 5, 8, 9], [6, 7, 10, 11]]
    shares = np.array([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]])
    split = capped(pool_of([6, 6], 3), shares, np.arange(12))
    assert lists(split) == [[0, 1, 2, 6], [3, 4, 7], [5, 8, 9, 10, 11]]


def test_capped_gives_nothing_to_the_full_even_if_all_shares_underflow():
    shares = np.array([[1.0, 0, 0], [1.0, 0, 0], [0, 0.5, 0.5]])
    counts = dirichlets.capped_counts(pool_of([4, 4, 4], 3), shares)
    assert counts.tolist() == [[4, 0, 0], [0, 2, 2], [0, 2, 2]]


@settings(max_examples=60, deadline=None)
@given(pools(), st.floats(0.01, 5), st.integers(0, 10**6))
def test_capped_clients_stay_as_they_are(pool, alpha, seed):
    counts = dirichlets.capped_counts(pool, rng(seed).dirichlet(np.full(pool.clients, alpha), pool.classes))
    assert (counts.sum(0) == pool.counts).all()
    before = np.cumsum(counts, 1) - counts
    assert not counts[before >= len(pool.labels) / pool.clients].any()


def test_golden_feddure_split():
    """14.5's check: numpy's legacy generator, shuffle then dirichlet for each class."""
    legacy = np.random.RandomState(0)
    order, shares = [], []
    for k in range(3):
        own = np.arange(8 * k, 8 * k + 8)
        legacy.shuffle(own)
        order.append(own)
        shares.append(legacy.dirichlet(np.full(4, 0.5)))
    split = capped(pool_of([8, 8, 8], 4), np.stack(shares), np.concatenate(order))
    assert [sorted(part) for part in lists(split)] == [
        [6, 10], [0, 1, 2, 3, 7, 18], [5, 11, 12, 14, 19, 22], [4, 8, 9, 13, 15, 16, 17, 20, 21, 23],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "samples, classes, alpha, median, full, per_client, r",
    [(46000, 10, 0.1, 412, 0.45, 4.3, 0.850), (46000, 10, 0.3, 468, 0.56, 7.0, 0.737),
     (4000, 10, 0.1, 34, 0.44, 3.0, 0.859), (4000, 10, 0.3, 41, 0.55, 5.4, 0.745),
     (40000, 100, 0.1, 408, 0.71, 31.1, 0.897), (40000, 100, 0.3, 404, 0.77, 56.6, 0.758),
     (10000, 100, 0.1, 102, 0.71, 23.0, 0.899), (10000, 100, 0.3, 101, 0.78, 40.1, 0.773)],
)  # fmt: skip
def test_capped_statistics(samples, classes, alpha, median, full, per_client, r):
    pool = Pool(balanced(samples, classes), classes, 100)
    seen = [count(parse(f"dirichlet-capped:{alpha},min_size=1")(pool, rng(seed)), pool) for seed in range(5)]
    sizes = np.stack([counts.sum(1) for counts in seen])
    assert np.median(sizes, 1).mean() == pytest.approx(median, rel=0.15)
    assert (sizes >= samples / 100).mean() == pytest.approx(full, abs=0.04)
    assert np.mean([(counts > 0).sum(1).mean() for counts in seen]) == pytest.approx(per_client, rel=0.06)
    assert np.mean([skew(counts) for counts in seen]) == pytest.approx(r, abs=0.015)


def test_capped_refuses_at_once_what_cannot_be():
    start = time.process_time()
    with pytest.raises(PartitionError) as caught:
        parse("dirichlet-capped:0.5,min_size=11")(Pool(balanced(1000), 10, 100), rng())
    assert caught.value.code == "min_size_impossible" and time.process_time() - start < 0.1


def test_capped_counts_its_tries():
    pool = Pool(balanced(4000), 10, 100)
    assert max(parse("dirichlet-capped:0.1,min_size=1")(pool, rng(seed)).tries for seed in range(8)) > 1
    with pytest.raises(PartitionError, match="in 3 tries") as caught:
        parse("dirichlet-capped:0.01,max_tries=3,min_size=1")(pool, rng())
    assert caught.value.code == "dirichlet_min_size"


# --- 4.4, 12.5


def unshuffled(pool: Pool, shares) -> EqualDraw:
    sizes = [pool.each] * (pool.clients - 1) + [len(pool.labels) - pool.each * (pool.clients - 1)]
    return EqualDraw(np.arange(len(pool.labels)), np.array(shares, float), [np.arange(n) for n in sizes])


def test_equal_example():
    pool = pool_of([10, 10], 4)
    split = dirichlets.apply_equal(pool, unshuffled(pool, [(0.9, 0.1), (0.8, 0.2), (0.7, 0.3)]))
    assert lists(split) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 10], [9, 11, 12, 13, 14], [15, 16, 17, 18, 19]]


def test_equal_hand_test_of_12_5():
    pool = pool_of([6, 6, 6], 3)
    split = dirichlets.apply_equal(pool, unshuffled(pool, np.array([(5, 1, 0), (4, 1, 1)]) / 6))
    assert count(split, pool).tolist() == [[5, 1, 0], [1, 4, 1], [0, 1, 5]]


def test_equal_rounding():
    assert dirichlets.rounded(np.array([[0.9, 0.1], [0.7, 0.3]]), 5).tolist() == [[5, 0], [3, 2]]
    # half to even makes 2, 2, 2, 0 of 1.5 each plus 0.5: the first of the largest gives one back
    assert dirichlets.rounded(np.array([[0.3, 0.3, 0.3, 0.1]]), 5).tolist() == [[1, 2, 2, 0]]
    ten = np.full((1, 20), 0.05)  # 20 times 0.6 rounds to 1: -7 at the first, hence largest remainders
    assert dirichlets.rounded(ten, 12).tolist() == [[1] * 12 + [0] * 8]


def test_golden_fedloke_split():
    labels = np.arange(1000) % 10
    np.random.seed(0)
    order = np.concatenate([np.flatnonzero(labels == k)[np.random.permutation(100)] for k in range(10)])
    shares = np.stack([np.random.dirichlet(np.full(10, 0.5)) for _ in range(9)])
    shuffles = [np.random.permutation(100) for _ in range(10)]
    pool = Pool(labels, 10, 10)
    split = dirichlets.apply_equal(pool, EqualDraw(order, shares, shuffles))
    assert count(split, pool).tolist() == [
        [42, 9, 9, 8, 4, 0, 2, 0, 1, 25], [1, 6, 4, 25, 0, 5, 19, 26, 9, 5], [6, 2, 0, 0, 0, 35, 2, 52, 2, 1],
        [13, 2, 15, 35, 5, 0, 20, 2, 8, 0], [29, 0, 4, 32, 2, 1, 0, 2, 11, 19], [9, 6, 0, 0, 19, 1, 1, 18, 18, 28],
        [0, 11, 0, 0, 14, 3, 32, 0, 39, 1], [0, 48, 1, 0, 0, 22, 24, 0, 2, 3], [0, 16, 48, 0, 12, 0, 0, 0, 6, 18],
        [0, 0, 19, 0, 44, 33, 0, 0, 4, 0],
    ]  # fmt: skip
    assert split.parts[0][:5].tolist() == [23, 289, 979, 51, 329]
    assert split.parts[9][:5].tolist() == [94, 908, 184, 865, 542]
    digest = hashlib.sha256(np.concatenate(split.parts).astype("<i8").tobytes()).hexdigest()
    assert digest == "6bba6d89579b45ba6be5885f5e2c2093ab14a9a897b5bda54d2a0300bd535b98"


@pytest.mark.parametrize("alpha, r, per_client", [(0.01, 0.913, 1.7), (0.1, 0.853, 4.8), (0.5, 0.651, 8.7)])
def test_equal_statistics(alpha, r, per_client):
    pool = Pool(balanced(50000), 10, 50)
    seen = [count(parse(f"dirichlet-equal:{alpha}")(pool, rng(seed)), pool) for seed in range(4)]
    assert np.mean([skew(counts) for counts in seen]) == pytest.approx(r, abs=0.02)
    assert np.mean([(counts > 0).sum(1).mean() for counts in seen]) == pytest.approx(per_client, rel=0.06)


def test_equal_makes_as_many_clients_as_asked_and_drops_the_surplus():
    split = parse("dirichlet-equal:0.5")(pool_of([30, 29], 20), rng())
    assert [len(part) for part in split.parts] == [2] * 20 and len(split.dropped) == 19


# --- 4.5


def test_client_example():
    pool = pool_of([4, 4, 4], 2)
    mixes = np.array([[0.75, 0.25, 0], [0.5, 0.5, 0]])
    assert dirichlets.client_counts(pool, mixes, np.array([6, 6])).tolist() == [[4, 2, 0], [0, 2, 4]]
    split = dirichlets.apply_client(pool, ClientDraw(np.arange(12), mixes))
    assert lists(split) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with pytest.raises(PartitionError) as caught:
        dirichlets.client_counts(pool, mixes, np.array([6, 7]))
    assert caught.value.code == "too_many_samples"


@pytest.mark.parametrize(
    "text, r, per_client",
    [("0.1,concentration=total", 0.902, 1.8), ("0.3,concentration=total", 0.893, 2.6), ("0.1", 0.845, 4.6), ("0.3", 0.729, 7.5)],
)  # fmt: skip
def test_client_statistics(text, r, per_client):
    pool = Pool(balanced(46000), 10, 100)
    seen = [count(parse(f"dirichlet-client:{text}")(pool, rng(seed)), pool) for seed in range(4)]
    assert all((counts.sum(1) == 460).all() for counts in seen)
    assert np.mean([skew(counts) for counts in seen]) == pytest.approx(r, abs=0.02)
    assert np.mean([(counts > 0).sum(1).mean() for counts in seen]) == pytest.approx(per_client, rel=0.08)


def test_client_mixes_average_to_the_prior():
    counts = np.array([10, 20, 0, 70])
    mixes = dirichlets.draw_mixes(counts, 4000, 0.5, "per-class", rng())
    assert mixes.mean(0) == pytest.approx(counts / 100, abs=0.02) and not mixes[:, 2].any()


# --- 4.6, 11.9


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6))
def test_skew_is_its_definition(clients, classes, seed):
    counts = np.random.default_rng(seed).integers(0, 9, (clients, classes)) + np.eye(clients, classes, dtype=int)
    counts[:, 0] += 1
    r = skew(counts)
    assert r == pytest.approx(brute_skew(counts), abs=1e-12)
    shuffled = np.random.default_rng(seed).permuted(counts, axis=0) if clients == 1 else counts[::-1, ::-1]
    assert skew(shuffled) == pytest.approx(r, abs=1e-12)
    assert skew(counts * 7) == pytest.approx(r, abs=1e-12)


@pytest.mark.parametrize(
    "clients, classes, bound", [(20, 10, 0.9474), (30, 10, 0.9310), (100, 10, 0.9091), (470, 47, 0.9808), (7, 10, 1)]
)
def test_largest_skew(clients, classes, bound):
    assert largest_skew(clients, classes) == pytest.approx(bound, abs=5e-5)
    one_class = np.eye(classes, dtype=int)[np.arange(clients) % classes]
    assert brute_skew(one_class) == pytest.approx(largest_skew(clients, classes), abs=1e-12)


def test_keep_and_deal_examples():
    four = skew_counts(pool_of([8] * 4, 4), 0.5)
    assert four.tolist() == [[5, 1, 1, 1], [1, 5, 1, 1], [1, 1, 5, 1], [1, 1, 1, 5]]
    six = skew_counts(pool_of([12] * 3, 6), 0.4)
    assert six.tolist() == [[4, 1, 1]] * 2 + [[1, 4, 1]] * 2 + [[1, 1, 4]] * 2
    assert skew(skews.sort_and_cut(np.array([12, 12, 12]), 6)) == pytest.approx(0.8)


SVHN = np.array([4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]) - 100


@pytest.mark.parametrize(
    "counts, clients, targets, error",
    [([4900] * 10, m, (0, 0.2, 0.4, 0.6, 0.8, 0.9), 0.0015) for m in (5, 7, 10, 20, 30)]
    + [([4500] * 10, 100, (0, 0.2, 0.4, 0.6, 0.8, 0.9), 0.0015), (SVHN, 10, (0, 0.2, 0.4, 0.6, 0.8, 0.9), 0.0015),
       (SVHN, 30, (0, 0.2, 0.4, 0.6, 0.8), 0.0015), ([2300] * 47, 47, (0, 0.2, 0.4, 0.6, 0.8, 0.9), 0.0015),
       ([400] * 100, 100, (0, 0.2, 0.4, 0.6, 0.8, 0.9), 0.002), ([2300] * 47, 470, (0.2, 0.6), 0.004)],
)  # fmt: skip
def test_wanted_r_is_reached(counts, clients, targets, error):
    for target in targets:
        made = skew_counts(pool_of(counts, clients), target)
        assert abs(skew(made) - target) <= error
        assert len(set(made.sum(1))) == 1 and (made.sum(0) <= counts).all()


def test_search_finds_what_trying_every_m_finds():
    for counts, clients, target in [([30, 17, 9], 4, 0.31), ([25] * 4, 7, 0.55), ([11, 50, 23, 8, 40], 6, 0.2)]:
        blocks = skews.sort_and_cut(np.array(counts), clients)
        each = int(blocks[0].sum())
        best = min(abs(brute_skew(skews.keep_and_deal(blocks, m)) - target) for m in range(each + 1))
        assert abs(skew(skews.counts_for(blocks, target)) - target) == pytest.approx(best, abs=1e-12)


def test_keep_and_deal_by_dealing_cards():
    """The closed form against dealing one by one."""
    blocks = skews.sort_and_cut(np.array([11, 50, 23, 8, 40]), 6)
    for kept in (0, 5, 13, 22):
        own = dealing.apportion(blocks, kept)
        pool = np.repeat(np.arange(5), blocks.sum(0) - own.sum(0))
        expected = own.copy()
        for t, k in enumerate(pool):
            expected[t % 6, k] += 1
        assert (skews.keep_and_deal(blocks, kept) == expected).all()


def test_what_r_cannot_be():
    def code(counts, clients, text):
        with pytest.raises(PartitionError) as caught:
            parse(text)(pool_of(counts, clients), rng())
        return caught.value.code

    assert code([500] * 10, 100, "skew:1") == "r_impossible"
    assert code([4900] * 10, 7, "skew:1") == "r_needs_drop"
    assert code([10, 6, 4], 2, "skew:0.3") == "r_not_reached"
    assert code([2300] * 47, 470, "skew:0") == "r_not_reached"
    assert code([20, 20], 1, "skew:0.5") == "r_impossible"
    assert code([20], 2, "skew:0.5") == "r_impossible"


def test_r_one_by_leaving_samples_out():
    seven = parse("skew:1,drop=true")(pool_of([4900] * 10, 7), rng())
    assert sum(map(len, seven.parts)) == 34300
    assert skew(count(seven, pool_of([4900] * 10, 7))) == 1
    svhn = parse("skew:1,drop=true")(pool_of(SVHN, 10), rng())
    assert sum(map(len, svhn.parts)) == 45590 and SVHN.sum() == 72257
    assert skew(skews.sort_and_cut(SVHN, 10)) == pytest.approx(0.941, abs=5e-4)
    assert skew(skews.sort_and_cut(np.full(10, 4900), 7)) == pytest.approx(0.943, abs=5e-4)
    pool = pool_of([40, 100, 60], 8)
    assert skew(count(parse("skew:0.75,drop=true")(pool, rng()), pool)) == pytest.approx(largest_skew(8, 3), abs=0.01)


@pytest.mark.parametrize("clients, bound", [(20, 0.947), (30, 0.931), (100, 0.909)])
def test_nominal_one_is_one_class_each(clients, bound):
    pool = pool_of([4500] * 10, clients)
    made = count(parse("skew:1,r_kind=nominal")(pool, rng()), pool)
    assert skew(made) == pytest.approx(bound, abs=5e-4)
    made = count(parse("skew:0.4,r_kind=nominal")(pool, rng()), pool)
    assert skew(made) == pytest.approx(0.4 * largest_skew(clients, 10), abs=0.003)


def test_a2_examples():
    def made(counts, clients, r=0.4):
        return skews.a2_counts(pool_of(counts, clients), r)

    assert made([100] * 3, 3).tolist() == [[60, 20, 20], [20, 60, 20], [20, 20, 60]]
    unequal = made([200, 100, 100], 3)
    assert unequal.tolist() == [[140, 30, 30], [30, 55, 15], [30, 15, 55]] and skew(unequal) == pytest.approx(0.4)
    pairs = made([100, 100], 4)
    assert sorted(pairs.tolist()) == [[15, 35]] * 2 + [[35, 15]] * 2 and skew(pairs) == pytest.approx(0.266667, abs=1e-6)
    sixteen = made([4900] * 10, 16)
    assert sorted(sixteen.sum(1)) == [2450] * 12 + [4900] * 4 and skew(sixteen) == pytest.approx(0.38, abs=1e-3)
    assert sixteen[0].tolist() == [1127] + [147] * 9
    assert made([10] * 5, 2, 1).sum() == 50  # fewer users than classes: all data still used


def test_class_pairs():
    pool = pool_of([500] * 10, 100)
    made = count(parse("class-pairs")(pool, rng()), pool)
    assert made[1].tolist() == [0, 0, 25, 25, 0, 0, 0, 0, 0, 0] and (made.sum(1) == 50).all()
    odd = count(parse("class-pairs")(pool_of([10] * 5, 5), rng()), pool_of([10] * 5, 5))
    assert (odd.sum(1) == 10).all() and ((odd > 0).sum(1) == 2).all()
    with pytest.raises(PartitionError) as caught:
        parse("class-pairs")(pool_of([500] * 10, 4), rng())
    assert caught.value.code == "too_few_clients"


# --- 4.7


def test_types():
    mixes = dealing.type_mixes(10)
    assert mixes[1].tolist() == [0.15, 0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03]
    assert mixes.sum(0) == pytest.approx(1) and mixes.sum(1) == pytest.approx(1)
    thousandths = np.rint(mixes * 100).astype(int)
    assert skew(thousandths) == pytest.approx(0.640, abs=5e-4)
    assert skew(np.tile(thousandths, (10, 1))) == pytest.approx(0.582, abs=5e-4)
    generic = dealing.type_mixes(7, "generic")
    assert generic.sum(1) == pytest.approx(1) and generic[2].tolist()[:4] == pytest.approx([0.05, 0.15, 0.5, 0.15])
    with pytest.raises(PartitionError) as caught:
        parse("batch-non-iid")(pool_of([50] * 7, 7), rng())
    assert caught.value.code == "fedmatch_types_need_10_classes"


def test_types_example():
    wanted = np.zeros((10, 10), int)
    wanted[3] = 3, 3, 15, 50, 15, 3, 3, 3, 2, 3
    split = dealing.apply_types(pool_of([100] * 10, 10), TypeDraw(np.arange(1000), wanted))
    expected = np.concatenate([100 * k + np.arange(n) for k, n in enumerate(wanted[3])])
    assert split.parts[3].tolist() == expected.tolist()


def test_types_of_100_clients():
    pool = pool_of([5100] * 10, 100)
    allow = count(parse("batch-non-iid")(pool, rng()), pool)
    assert allow.sum(1).max() == 510 and allow.sum(1).min() > 400
    assert (allow.argmax(1)[:90] == np.arange(90) % 10).all()
    assert (count(parse("batch-non-iid,short=refill")(pool, rng()), pool).sum(1) == 510).all()


# --- the language


@pytest.mark.parametrize(
    "text, code, hint",
    [("dirichlet-caped:0.3", "unknown_partition", "did you mean 'dirichlet-capped'"),
     ("dirichlet-capped", "bad_alpha", "write dirichlet-capped:0.3"), ("dirichlet-capped:0", "bad_alpha", "between"),
     ("dirichlet-equal:-1", "bad_alpha", "between"), ("dirichlet-client:nan", "bad_alpha", "between"),
     ("dirichlet-client:x", "bad_alpha", "a number"), ("skew:1.2", "bad_r", "between 0 and 1"),
     ("skew:0.3,rkind=nominal", "bad_option", "did you mean 'r_kind'"), ("iid:stratfied", "bad_option", "stratified"),
     ("shards:2.5", "shards_too_many", "whole number"), ("class-pairs:3", "bad_option", "no value"),
     ("shards:2,distinct=maybe", "bad_option", "true or false"), ("natural,tie=joint", "bad_option", "known are")],
)  # fmt: skip
def test_mistakes_are_told_with_a_remedy(text, code, hint):
    with pytest.raises(PartitionError) as caught:
        parse(text)
    assert caught.value.code == code and hint in str(caught.value) and isinstance(caught.value, UserError)
    assert str(caught.value).count(";") >= 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", EVERY + ["natural", "natural,small_clients=merge,min_total=5", "dirichlet-client:2,tie=same-q"])
def test_text_reads_back(text):
    assert parse(str(parse(text))) == parse(text)


def test_listing():
    assert list(PARTITIONS) == [
        "iid", "shards", "dirichlet-capped", "dirichlet-equal", "dirichlet-client", "dirichlet-pairs", "skew", "class-pairs",
        "batch-non-iid", "natural",
    ]  # fmt: skip
    for kind in PARTITIONS.values():
        assert kind.line and kind.paper and parse(kind.example).name == kind.name


@pytest.mark.parametrize("samples, clients, code", [(0, 3, "empty"), (3, 5, "too_many_clients"), (3, 0, "empty")])
def test_pools_that_cannot_be_shared(samples, clients, code):
    with pytest.raises(PartitionError) as caught:
        parse("iid")(Pool(np.zeros(samples, int), 1, clients), rng())
    assert caught.value.code == code


def test_class_partitions_want_labels():
    labels = np.array([0, 1, -1, 1, 0, 1])
    assert len(parse("iid")(Pool(labels, 2, 2), rng()).parts) == 2
    for text in ("iid:stratified", "skew:0", "dirichlet-client:1", "class-pairs"):
        with pytest.raises(PartitionError) as caught:
            parse(text)(Pool(labels, 2, 2), rng())
        assert caught.value.code == "unknown_labels"


def test_a_missing_class_is_a_warning():
    with pytest.warns(UserWarning, match="missing_class"):
        parse("dirichlet-equal:1")(pool_of([10, 0, 10], 2), rng())
