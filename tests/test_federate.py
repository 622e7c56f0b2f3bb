"""Label scenarios x partitions: who holds what, once, and the same again; saved, loaded, drawn and told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fallow.data.dealing import EMPTY
from fallow.data.federate import Federation, Holding, PartitionError, Spec, federate, ids_of_lists, skew, table
from fallow.data.picture import lines, picture
from fallow.errors import UserError

warnings.filterwarnings("ignore", message="missing_class")

PARTITIONS = [
    "iid", "iid:stratified", "iid:spread", "shards:2", "dirichlet-capped:0.5", "dirichlet-equal:0.5",
    "dirichlet-client:0.3", "skew:0.4", "class-pairs", "batch-non-iid", "skew:0.5,rule=a2",
]  # fmt: skip
AMOUNTS = [{"label_count": 400}, {"label_ratio": 0.2}, {"label_per_class": 4}, {}]
LABELS = np.random.default_rng(7).permutation(np.arange(4000) % 10)


def check_once(federation: Federation, samples: int = len(LABELS)) -> None:
    """Every index once in server, clients and dropped."""
    held = [part for client in federation.clients for part in (client.labelled, client.unlabelled)]
    everything = np.concatenate([federation.server.labelled, federation.dropped, *held])
    assert everything.dtype == np.int64
    assert sorted(everything.tolist()) == list(range(samples))
    assert not len(federation.server.unlabelled)


def code_of(labels, classes, natural=None, /, **keys) -> str:
    with pytest.raises(PartitionError) as caught:
        federate(np.asarray(labels), classes, Spec(**keys), natural)
    text = str(caught.value)
    assert caught.value.cause and caught.value.remedy and "\n" not in text and "Traceback" not in text
    return caught.value.code


@pytest.mark.parametrize("partition", PARTITIONS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    labels=st.sampled_from(["server", "clients", "some", "all"]),
    amount=st.sampled_from(AMOUNTS),
    seed=st.integers(0, 10**6),
    used=st.sampled_from([1.0, 0.5, 0.0]),
    pick=st.sampled_from(["random", "first"]),
)
def test_every_scenario_and_partition(partition, labels, amount, seed, used, pick):
    spec = Spec(labels=labels, clients=10, partition=partition, seed=seed, unlabelled_ratio=used, label_pick=pick, **amount)
    try:
        made = federate(LABELS, 10, spec)
    except PartitionError as error:  # 5 labelled clients of few samples cannot be everything
        assert error.code in {"r_not_reached", "r_impossible", "r_needs_drop", "dirichlet_min_size"}
        return
    check_once(made)
    assert len(made.clients) == 10 and made.names == tuple("0123456789")
    with_labels = sum(len(client.labelled) > 0 for client in made.clients)
    assert with_labels == {"server": 0, "clients": 10, "some": 5, "all": 10}[labels]
    assert (len(made.server.labelled) > 0) == (labels == "server")
    if labels == "all" or used == 0:
        assert not any(len(client.unlabelled) for client in made.clients)
    counts = made.counts(LABELS, 10)
    for side in ("labelled", "unlabelled"):
        for row, client in zip(counts[side], made.clients):
            assert row.tolist() == [int((LABELS[getattr(client, side)] == k).sum()) for k in range(10)]
    assert federate(LABELS, 10, spec).fingerprint == made.fingerprint
    if used or pick == "random":  # else nobody holds anything drawn
        assert federate(LABELS, 10, replace(spec, seed=seed + 1)).fingerprint != made.fingerprint
    assert json.loads(json.dumps(made.spec))["seed"] == seed


def test_skew_of_both_pools_is_what_was_asked():
    made = federate(LABELS, 10, Spec(labels="clients", label_count=1000, clients=10, partition="skew:0.6"))
    counts = made.counts(LABELS, 10)
    assert skew(counts["labelled"]) == pytest.approx(0.6, abs=0.01)
    assert skew(counts["unlabelled"]) == pytest.approx(0.6, abs=0.01)
    assert (counts["labelled"].argmax(1) == counts["unlabelled"].argmax(1)).all()  # one permutation for both pools
    assert counts["labelled"].argmax(1).tolist() != sorted(counts["labelled"].argmax(1))
    plain = federate(LABELS, 10, Spec(labels="server", label_count=10, clients=10, partition="skew:1,shuffle_clients=false"))
    assert plain.counts(LABELS, 10)["unlabelled"].argmax(1).tolist() == list(range(10))


def test_skew_of_some_stays_with_the_class():
    labels = np.arange(10000) % 10
    made = federate(labels, 10, Spec(labels="some", label_count=500, labelled_clients=10, clients=20, partition="skew:0.9"))
    counts = made.counts(labels, 10)
    who = counts["labelled"].sum(1) > 0
    assert who.sum() == 10
    ours = counts["labelled"][who].argmax(1), counts["unlabelled"][who].argmax(1)
    assert (np.argsort(ours[1], kind="stable") == np.argsort(ours[0], kind="stable")).all()


# --- the papers' settings


def test_semifl_and_feddb():
    cifar = np.arange(50000) % 10
    semifl = federate(cifar, 10, Spec(labels="server", label_count=4000, clients=100))
    assert {len(client.unlabelled) for client in semifl.clients} == {460} and not len(semifl.dropped)
    assert (np.diff(cifar[semifl.server.labelled]) >= 0).all()  # class by class
    feddb = Spec(labels="clients", label_count=4000, clients=100, labelled_as_unlabelled=True)
    made = federate(cifar, 10, feddb)
    assert {(len(c.labelled), len(c.unlabelled)) for c in made.clients} == {(40, 500)}
    assert all((c.unlabelled[:40] == c.labelled).all() for c in made.clients)
    svhn = np.repeat(np.arange(10), [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659])
    made = federate(svhn, 10, replace(feddb, label_count=1000, labelled_as_unlabelled=False))
    assert {(len(c.labelled), len(c.unlabelled)) for c in made.clients} == {(10, 722)} and len(made.dropped) == 57
    apart = federate(cifar, 10, replace(feddb, partition="dirichlet-capped:0.1,min_size=1"))
    counts = apart.counts(cifar, 10)
    assert 0.82 < skew(counts["labelled"]) < 0.89
    own = counts["unlabelled"] - counts["labelled"]
    overlap = np.minimum(counts["labelled"] / counts["labelled"].sum(1)[:, None], own / own.sum(1)[:, None]).sum(1)
    assert overlap.mean() < 0.4  # two independent draws


@pytest.mark.parametrize(
    "samples, clients, ratio, labelled, unlabelled, unused",
    [(50000, 50, 0.01, 10, 990, 0), (50000, 50, 0.05, 50, 950, 0), (50000, 50, 0.1, 100, 900, 0),
     (73257, 50, 0.01, 14, 1451, 7), (73257, 50, 0.05, 73, 1392, 7), (73257, 50, 0.1, 146, 1319, 7),
     (100000, 50, 0.01, 20, 1980, 0), (50000, 30, 0.05, 83, 1583, 20), (50000, 40, 0.05, 62, 1188, 0),
     (50000, 60, 0.05, 41, 792, 20)],
)  # fmt: skip
def test_fedloke_table(samples, clients, ratio, labelled, unlabelled, unused):
    spec = Spec(labels="clients", label_ratio=ratio, clients=clients, partition="dirichlet-equal:0.5")
    made = federate(np.arange(samples) % 10, 10, spec)
    assert {(len(c.labelled), len(c.unlabelled)) for c in made.clients} == {(labelled, unlabelled)}
    assert len(made.dropped) == unused
    part = federate(np.arange(samples) % 10, 10, replace(spec, unlabelled_ratio=0.6))
    assert {len(c.unlabelled) for c in part.clients} == {int(0.6 * unlabelled + 1e-9)}
    assert all((p.unlabelled == m.unlabelled[: len(p.unlabelled)]).all() for p, m in zip(part.clients, made.clients))


def test_feddure():
    cifar = np.arange(50000) % 10
    spec = Spec(labels="clients", label_per_class=5, clients=100, partition="iid:stratified")
    made = federate(cifar, 10, spec)
    counts = made.counts(cifar, 10)
    assert (counts["labelled"] == 5).all() and (counts["unlabelled"] == 45).all()
    first = federate(cifar, 10, replace(spec, label_pick="first"))
    chosen = np.concatenate([c.labelled for c in first.clients])
    assert sorted(chosen) == list(range(5000))  # the first 500 of each class in file order
    apart = federate(cifar, 10, replace(spec, partition="dirichlet-capped:0.5,shuffle=true"))
    sizes = [len(c.labelled) for c in apart.clients]
    assert min(sizes) >= 10 and sum(sizes) == 5000 and 40 < np.median(sizes) < 62
    joint = federate(cifar, 10, replace(spec, partition="dirichlet-capped:0.5,tie=joint"))
    counts = joint.counts(cifar, 10)
    assert (counts["labelled"] == np.minimum(counts["labelled"] + counts["unlabelled"], 5)).all()
    mixed = federate(cifar, 10, replace(spec, unlabelled_partition="dirichlet-capped:0.5"))
    assert (mixed.counts(cifar, 10)["labelled"] == 5).all()


def test_fedrgd_labels_at_clients():
    cifar = np.arange(50000) % 10
    spec = Spec(labels="clients", label_count=5000, clients=100, partition="class-pairs", unlabelled_partition="iid")
    counts = federate(cifar, 10, spec).counts(cifar, 10)
    assert sorted(set(counts["labelled"].ravel())) == [0, 25] and (counts["labelled"].sum(1) == 50).all()
    assert (counts["unlabelled"].sum(1) == 450).all()


def test_dirichlet_client_same_mix_for_both_pools():
    spec = Spec(labels="clients", label_count=1000, clients=10, partition="dirichlet-client:0.5,tie=same-q")

    def distance(partition):
        counts = federate(LABELS, 10, replace(spec, partition=partition)).counts(LABELS, 10)
        mixes = [counts[side] / counts[side].sum(1)[:, None] for side in ("labelled", "unlabelled")]
        return np.abs(mixes[0] - mixes[1])[:5].sum(1).mean()  # later clients meet exhausted classes

    assert distance("dirichlet-client:0.5,tie=same-q") < 0.1 < 0.5 < distance("dirichlet-client:0.5")


# --- amounts of labels


def test_balance_and_pick():
    rare = np.repeat([0, 1, 2], [1000, 500, 20])

    def made(**keys):
        return np.bincount(rare[federate(rare, 3, Spec(labels="server", clients=5, **keys)).server.labelled], minlength=3)

    assert made(label_count=50).tolist() == [16, 16, 16]  # 50 mod 3 is lost
    assert made(label_count=300, label_balance="random").sum() == 300
    assert made(label_count=300, label_balance="random")[2] < 20
    assert made(label_per_class=7).tolist() == [7, 7, 7]
    assert made(label_ratio=0.5, label_balance="random").sum() == 760
    first = federate(rare, 3, Spec(label_count=30, label_pick="first", clients=5)).server.labelled
    assert first.tolist() == [*range(10), *range(1000, 1010), *range(1500, 1510)]
    assert made().sum() == 152  # a tenth by default; class 2 is too small to balance it
    assert len(federate(LABELS, 10, Spec()).server.labelled) == 400


def test_balanced_ratio_at_clients():
    labels = np.repeat([0, 1], [900, 100])
    spec = Spec(labels="clients", label_ratio=0.1, label_balance="balanced", clients=5)
    assert federate(labels, 2, spec).counts(labels, 2)["labelled"].tolist() == [[10, 10]] * 5
    counts = federate(labels, 2, replace(spec, label_balance=None)).counts(labels, 2)["labelled"]
    assert counts.sum(1).tolist() == [20] * 5 and counts[:, 0].min() > 12


def test_a_ratio_is_not_bitten_by_floats():
    made = federate(np.arange(1000) % 10, 10, Spec(labels="clients", label_ratio=0.29, clients=10))
    assert {len(c.labelled) for c in made.clients} == {29}


@pytest.mark.parametrize("wanted, count", [(None, 5), (0.25, 3), (3, 3), (1, 1), (10, 10)])
def test_labelled_clients(wanted, count):
    spec = Spec(labels="some", label_count=100, labelled_clients=wanted, clients=10)
    made = federate(LABELS, 10, spec)
    assert sum(len(c.labelled) > 0 for c in made.clients) == count
    assert all(len(c.unlabelled) for c in made.clients)
    who = {tuple(i for i, c in enumerate(federate(LABELS, 10, replace(spec, seed=s)).clients) if len(c.labelled)) for s in range(9)}
    assert len(who) > 1 or count == 10


def test_unknown_labels_are_never_labelled():
    labels = np.where(np.arange(3000) < 500, np.arange(3000) % 10, -1)  # as in STL-10
    for keys in ({"label_count": 200}, {}, {"label_per_class": 20}):
        made = federate(labels, 10, Spec(labels="server", clients=10, **keys))
        check_once(made, 3000)
        assert (labels[made.server.labelled] >= 0).all()
        assert len(made.server.labelled) == (200 if keys else 500)
    made = federate(labels, 10, Spec(labels="clients", clients=10, partition="skew:0.5", unlabelled_partition="iid"))
    assert sum(len(c.labelled) for c in made.clients) == 500 and sum(len(c.unlabelled) for c in made.clients) == 2500
    joint = federate(labels, 10, Spec(labels="clients", clients=5, label_ratio=0.5))
    assert all((labels[c.labelled] >= 0).all() and len(c.labelled) for c in joint.clients)
    oracle = federate(labels, 10, Spec(labels="all", clients=5, label_ratio=0.5))
    assert sum(len(c.labelled) for c in oracle.clients) == 500
    assert code_of(labels, 10, labels="server", label_count=100, clients=10, partition="skew:0.5") == "unknown_labels"


# --- natural clients


def test_natural_example():
    made = federate(np.array([0, -1, 1, -1, 2]), 3, Spec(labels="clients", partition="natural"), list("babba"))
    assert made.names == ("a", "b")
    assert [(c.labelled.tolist(), c.unlabelled.tolist()) for c in made.clients] == [([4], [1]), ([0, 2], [3])]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3)), min_size=4, max_size=60), st.integers(0, 99))
def test_natural_keeps_everyone_s_samples(rows, seed):
    ids, labels = [f"c{i}" for i, _ in rows], np.array([k for _, k in rows])
    for keys in ({}, {"label_ratio": 1.0}, {"label_ratio": 0.5}, {"label_per_class": 1}):
        spec = Spec(labels="clients", partition="natural", seed=seed, **keys)
        try:
            made = federate(labels, 4, spec, ids)
        except PartitionError as error:
            assert error.code == "no_labels"
            continue
        check_once(made, len(rows))
        for name, client in zip(made.names, made.clients):
            assert {ids[i] for i in np.r_[client.labelled, client.unlabelled]} == {name}
            assert (np.diff(client.labelled) > 0).all() and (np.diff(client.unlabelled) > 0).all()
            assert (labels[client.labelled] >= 0).all()
            if keys.get("label_ratio") == 1.0:
                assert (labels[client.unlabelled] == -1).all()


def test_natural_newcomer_changes_nobody_else():
    ids, spec = ["a"] * 20 + ["b"] * 20, Spec(labels="clients", partition="natural", label_ratio=0.5)
    before = federate(np.zeros(40, int), 1, spec, ids)
    after = federate(np.zeros(60, int), 1, spec, ids + ["c"] * 20)
    assert all((x.labelled == y.labelled).all() for x, y in zip(before.clients, after.clients))


def test_natural_server_pool_and_small_clients():
    labels, ids = np.arange(12) % 2, ["server"] * 4 + ["x"] * 5 + ["y"] * 2 + ["z"]
    made = federate(labels, 2, Spec(labels="server", partition="natural", label_count=4), ids)
    assert sorted(made.server.labelled) == [0, 1, 2, 3] and made.names == ("x", "y", "z")
    check_once(made, 12)
    taken = federate(labels, 2, Spec(labels="server", partition="natural", label_count=2), ["x"] * 6 + ["y"] * 6)
    check_once(taken, 12)
    assert len(taken.server.labelled) == 2
    rest = ids[4:]
    merged = federate(labels[4:], 2, Spec(labels="all", partition="natural,min_total=3,small_clients=merge"), rest)
    assert merged.names == ("x", "y+z") and [len(c.labelled) for c in merged.clients] == [5, 3]
    dropped = federate(labels[4:], 2, Spec(labels="all", partition="natural,min_total=3,small_clients=drop"), rest)
    assert dropped.names == ("x",) and dropped.dropped.tolist() == [5, 6, 7]
    some = federate(labels[4:], 2, Spec(labels="some", partition="natural", label_per_class=1, labelled_clients=1), rest)
    assert sum(len(c.labelled) > 0 for c in some.clients) == 1


@pytest.mark.parametrize(
    "labels, ids, keys, code",
    [([0, 1], ["a", None], {}, "unassigned"), ([-1, -1], ["a", "b"], {}, "no_labels"), ([0, 1], ["a"], {}, "bad_index"),
     ([0, -1], ["a", "b"], {"partition": "natural,min_labelled=1"}, "too_few_labelled"),
     ([0, 5], ["a", "b"], {}, "bad_label"), ([0, 1], None, {}, "no_clients"), ([0, 1], ["a", "b"], {"clients": 3}, "client_count"),
     ([0, 1], ["a", "server"], {}, "server_pool"), ([0, 1], ["a", "b"], {"unlabelled_partition": "iid"}, "natural_alone"),
     ([0, 1, 0], ["a", "a", "b"], {"partition": "natural,min_total=2"}, "empty_client")],
)  # fmt: skip
def test_natural_errors(labels, ids, keys, code):
    assert code_of(labels, 2, ids, **{"labels": "clients", "partition": "natural", **keys}) == code


def test_ids_of_lists():
    assert ids_of_lists({"b": [0, 2], "a": [1]}, 4) == ["b", "a", "b", None]
    for lists, code in (({"a": [0], "b": [0]}, "overlap"), ({"a": [4]}, "bad_index"), ({"a": []}, "empty_client")):
        with pytest.raises(PartitionError) as caught:
            ids_of_lists(lists, 4)
        assert caught.value.code == code


# --- mistakes


@pytest.mark.parametrize(
    "keys, code",
    [({"label_count": 5000}, "not_enough_labelled"), ({"label_per_class": 401}, "not_enough_labelled"),
     ({"label_count": 5000, "label_balance": "random"}, "not_enough_labelled"), ({"label_count": 5}, "no_labelled"),
     ({"label_count": 0}, "no_labelled"), ({"label_count": 9, "label_ratio": 0.1}, "label_keys"),
     ({"labels": "clients", "label_count": 2500, "labelled_as_unlabelled": "alias"}, "no_alias"),
     ({"labels": "clients", "label_ratio": 0.1, "labelled_as_unlabelled": "alias"}, "no_alias"),
     ({"labels": "server", "label_count": 50, "labelled_as_unlabelled": "alias"}, "no_alias"),
     ({"label_ratio": 1.5}, "bad_option"), ({"labels": "client"}, "bad_option"), ({"label_pick": "last"}, "bad_option"),
     ({"clients": 5000}, "too_many_clients"), ({"clients": 0}, "empty"), ({"seed": -1}, "bad_option"),
     ({"labels": "clients", "label_count": 50, "clients": 60}, "too_many_clients"),
     ({"labels": "clients", "label_ratio": 0.001, "clients": 10}, "no_labelled"),
     ({"labels": "clients", "label_ratio": 0.1, "partition": "iid", "unlabelled_partition": "skew:0.5"}, "tie_conflict"),
     ({"labels": "clients", "label_count": 90, "partition": "dirichlet-client:1,tie=same-q", "unlabelled_partition": "iid"}, "tie_conflict"),
     ({"labels": "some", "labelled_clients": 11}, "bad_labelled_clients"), ({"unlabelled_ratio": 2}, "bad_option"),
     ({"labels": "some", "labelled_clients": 1.5}, "bad_labelled_clients"), ({"partition": "iidd"}, "unknown_partition"),
     ({"labels": "clients", "label_count": 10, "label_balance": "random", "partition": "dirichlet-capped:1,min_size=2"}, "min_size_impossible")],
)  # fmt: skip
def test_mistakes_by_code(keys, code):
    assert code_of(LABELS, 10, **keys) == code


def test_no_data_and_wrong_labels():
    assert code_of([], 2) == "empty"
    assert code_of([0, 1, 2], 2) == "bad_label"
    assert code_of([0, 1, -2], 2) == "bad_label"


def test_an_impossible_dirichlet_ends():
    start = time.process_time()
    assert code_of(np.arange(50000) % 10, 10, clients=100, partition="dirichlet-capped:0.01") == "dirichlet_min_size"
    assert time.process_time() - start < 5


# --- file, fingerprint, table, picture


def test_fingerprint_sees_who_holds_what():
    five, ten = (federate(np.zeros(110, int), 1, Spec(label_count=10, clients=m)) for m in (5, 10))
    flat = [np.concatenate([c.unlabelled for c in f.clients]) for f in (five, ten)]
    assert (flat[0] == flat[1]).all() and five.fingerprint != ten.fingerprint
    assert len(five.fingerprint) == 64


def test_save_and_load(tmp_path):
    made = federate(LABELS, 10, Spec(labels="some", label_count=100, partition="skew:0.3,rule=a2"))
    path = tmp_path / "federation.npz"
    made.save(path)
    read = Federation.load(path)
    assert read.fingerprint == made.fingerprint and read.names == made.names and read.spec == made.spec
    assert read.tries == made.tries and (read.dropped == made.dropped).all()
    assert all((a.labelled == b.labelled).all() for a, b in zip(read.clients, made.clients))
    assert [p.name for p in tmp_path.iterdir()] == ["federation.npz"]
    once = path.read_bytes()
    made.save(path)
    assert path.read_bytes() == once


@pytest.mark.parametrize("how", [{"label_count": 100}, {"label_ratio": 0.1, "label_count": None}, {"labels": "server", "label_count": 100}])
def test_what_the_ratio_leaves_out_is_counted(tmp_path, how):
    """The same split with all of it tells what each client had."""
    whole, none, half = (federate(LABELS, 10, Spec(**how, unlabelled_ratio=u)) for u in (1.0, 0.0, 0.5))
    had = [len(c.unlabelled) for c in whole.clients]
    assert [c.unused for c in whole.clients] == [0] * len(had) and [c.unused for c in none.clients] == had
    assert [c.unused + len(c.unlabelled) for c in half.clients] == had
    path = tmp_path / "federation.npz"
    half.save(path)
    assert [c.unused for c in Federation.load(path).clients] == [c.unused for c in half.clients]
    older = {name: array for name, array in half.arrays().items() if name != "unused"}
    assert [c.unused for c in Federation.of(older).clients] == [0] * len(had)


def test_damage_is_seen(tmp_path):
    path = tmp_path / "federation.npz"
    federate(LABELS, 10, Spec(label_count=100)).save(path)
    whole = path.read_bytes()
    for damaged in (b"", b"no zip", whole[: len(whole) // 2], whole[:2000] + bytes([whole[2000] ^ 255]) + whole[2001:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            Federation.load(path)
    path.write_bytes(whole)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["unlabelled"][0] += 1
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="damaged"):
        Federation.load(path)
    with pytest.raises(UserError, match="there is no federation file"):
        Federation.load(tmp_path / "none.npz")


def test_table():
    made = federate(LABELS, 10, Spec(labels="clients", label_count=1000, clients=10, partition="skew:0.6"))
    names = [f"class {k}" for k in range(10)]
    rows, summary = table(made, LABELS, names)
    assert len(rows) == 10 and rows[0]["labelled"] == 100 and rows[0]["unlabelled"] == 300
    counts = made.counts(LABELS, 10)
    assert rows[3]["largest"] == names[int(counts["unlabelled"][3].argmax())]
    assert summary["r_labelled"] == skew(counts["labelled"]) and summary["unlabelled_sizes"] == (300, 300.0, 300)
    assert summary["classes_per_client"] == 10.0 and summary["fingerprint"] == made.fingerprint
    server = table(federate(LABELS, 10, Spec(label_count=100)), LABELS, names).summary
    assert server["r_labelled"] is None and server["server_labelled"] == 100 and server["r_unlabelled"] > 0
    json.dumps([rows, summary])


@pytest.mark.parametrize("clients, name", [(10, "a.png"), (100, "b.png"), (3, "c.svg")])
def test_picture(tmp_path, clients, name):
    spec = Spec(labels="server" if clients == 10 else "clients", label_count=1000, clients=clients)
    made = federate(LABELS, 10, spec)
    path = picture(made, LABELS, 10, tmp_path / name, [f"c{k}" for k in range(10)])
    assert path.stat().st_size > 5000
    with pytest.raises(UserError, match=r"\.png or \.svg"):
        picture(made, LABELS, 10, tmp_path / "a.txt")


def test_importing_is_light():
    heavy = "import sys, fallow.data.federate; print([m for m in ('torch', 'matplotlib', 'pydantic', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_fast_enough():
    labels = np.random.default_rng(0).permutation(np.arange(50000) % 10)
    for partition in PARTITIONS:
        start = time.process_time()
        federate(labels, 10, Spec(labels="clients", label_count=5000, clients=100, partition=partition))
        assert time.process_time() - start < 0.8, partition


def test_uneven():
    """Clients without labels do not count."""
    held = lambda *sizes: Federation(Holding(EMPTY, EMPTY), tuple(Holding(np.arange(n), EMPTY) for n in sizes), EMPTY, (), {})
    assert held(3, 2).uneven and not held(3, 3).uneven and not held(3, 0, 3).uneven and not held(0).uneven


def test_classes_that_nobody_knows_have_no_panel(tmp_path):
    """Named in the headline instead; and the discs of three wide cells stay in them."""
    labels = np.where(np.arange(300) // 3 % 3 == 0, np.arange(300) // 9 % 2, -1)
    made = federate(labels, 2, Spec(labels="clients", label_ratio=None, label_count=None, clients=3, partition="natural"), ["a", "b", "c"] * 100)
    assert sum(len(c.unlabelled) for c in made.clients) == 198
    text = picture(made, labels, 2, tmp_path / "p.svg").read_text()
    assert "<!-- unlabelled: 198 of unknown class -->" in text and text.count("<!-- client -->") <= 1
    assert "<!-- labelled: 102, R" in text and text.count("(largest disc") == 1


def test_a_summary_for_people():
    found = lines({"clients": 3, "classes_per_client": 2.0, "r_labelled": 0.0196248, "r_unlabelled": None, "labelled_sizes": (28, 33.5, 35)})
    assert found == ["clients: 3", "classes per client: 2", "R labelled: 0.020", "labelled sizes: 28 to 35, median 33.5"]
