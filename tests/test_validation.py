"""Labels held out for validation: which, that nothing learns from them, and the best round's weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, best_weights, few_digits, rows, same, weights
from PIL import Image

import fallow
from fallow import machine
from fallow.data.dealing import EMPTY
from fallow.data.federate import Spec, federate
from fallow.data.holdings import Federation, Holding, table
from fallow.data.readers.common import ImageSet
from fallow.data.validation import apportioned, hold_out, sentences
from fallow.engine.evaluating import Best
from fallow.engine.party import Job, Party
from fallow.errors import UserError
from fallow.export.predict import Predictor
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import NEWER, UNHASHED, config_hash, resolve

KEYS: dict[str, Any] = TINY | {"method": "fixmatch", "label_count": 120, "threshold": 0.12, "validation": 0.2, "rounds": 4, "lr": 0.1}


def made(*parties: list[int], classes: int = 2) -> tuple[Federation, np.ndarray]:
    """Clients with so many labelled samples of each class, and an unlabelled sample each."""
    labels, clients = [], []
    for sizes in parties:
        start = len(labels)
        labels += [c for c, n in enumerate(sizes) for _ in range(n)] + [0]
        clients.append(Holding(np.arange(start, len(labels) - 1), np.array([len(labels) - 1])))
    names = tuple(f"site {i}" for i in range(len(clients)))
    return Federation(Holding(EMPTY, EMPTY), tuple(clients), EMPTY, names, {}), np.array(labels)


def tally(f: Federation, labels: np.ndarray) -> list[list[int]]:
    return [np.bincount(labels[c.validation], minlength=2).tolist() for c in f.clients]


# -- which labels --------------------------------------------------------------------------------------------------------
def test_a_share_of_each_class_at_each_party() -> None:
    f, labels = made([20, 10], [5, 10], [40, 0])
    out = hold_out(f, labels, 0.2, seed=0)
    assert tally(out, labels) == [[4, 2], [1, 2], [8, 0]]
    for before, after in zip(f.clients, out.clients):
        assert sorted([*after.labelled, *after.validation]) == before.labelled.tolist()
        assert (np.diff(after.labelled) > 0).all() and (after.unlabelled == before.unlabelled).all()


def test_the_nearest_whole_number_of_a_share() -> None:
    f, labels = made([4], [5], [14], [15])  # 0.4, 0.5, 1.4, 1.5
    assert [len(c.validation) for c in hold_out(f, labels, 0.1, seed=0).clients] == [0, 1, 1, 2]


def test_a_count_is_of_the_whole_federation() -> None:
    f, labels = made([30], [20], [10], [1])
    out = hold_out(f, labels, 13, seed=0)  # 6.39, 4.26, 2.13, and 0.21, of a party that keeps its only label
    assert [len(c.validation) for c in out.clients] == [7, 4, 2, 0]


def test_a_class_keeps_a_label_while_another_has_more() -> None:
    f, labels = made([1, 9], [1, 1])
    out = hold_out(f, labels, 0.5, seed=0)
    assert tally(out, labels)[0] == [0, 5]
    assert sum(tally(out, labels)[1]) == 1, "no class there has more than one, and one is held out all the same"


def test_what_rounding_takes_from_a_class_comes_back_at_the_next_party() -> None:
    """Ten clients with one label of each of ten classes hold one out each: of every class one in all."""
    labels = np.tile(np.arange(10), 10)
    clients = tuple(Holding(np.arange(10 * i, 10 * i + 10), EMPTY) for i in range(10))
    f = Federation(Holding(EMPTY, EMPTY), clients, EMPTY, tuple(map(str, range(10))), {})
    for seed in range(3):
        out = hold_out(f, labels, 0.1, seed)
        assert sorted(labels[np.concatenate([c.validation for c in out.clients])]) == list(range(10))


def test_apportioned_by_hand() -> None:
    five = np.full(3, 5)
    assert apportioned(np.array([1.5, 2.25, 0.25]), 4, five, 0).tolist() == [2, 2, 0]
    assert apportioned(np.array([3.0, 1.1, 0.0]), 4, np.array([2, 5, 5]), 0).tolist() == [2, 2, 0]  # a cap
    assert sorted(apportioned(np.array([0.5, 0.5, 0.5]), 2, five, 0).tolist()) == [0, 1, 1]
    assert {tuple(apportioned(np.array([0.5, 0.5]), 1, five[:2], key)) for key in range(20)} == {(0, 1), (1, 0)}  # a tie is drawn


def test_draws_follow_the_seed() -> None:
    f, labels = made([50, 50], [50, 50])
    one, again, other = (hold_out(f, labels, 0.1, seed) for seed in (1, 1, 2))
    assert one.fingerprint == again.fingerprint != other.fingerprint


def test_nobody_else_has_what_is_held_out() -> None:
    """Where labelled samples serve as unlabelled ones, too, and with labels at the server."""
    labels = np.arange(400) % 10
    for keys in ({"labels": "clients", "labelled_as_unlabelled": True}, {"labels": "server"}, {"labels": "all"}, {"labels": "some"}):
        f = federate(labels, 10, Spec(label_count=100, clients=4, **keys))
        out = hold_out(f, labels, 0.25, seed=0)
        held = np.concatenate([out.server.validation, *(c.validation for c in out.clients)])
        others = np.concatenate([p for h in (out.server, *out.clients) for p in (h.labelled, h.unlabelled)])
        assert len(held) and not np.isin(held, others).any(), keys
        assert set(held) | set(others) == {int(i) for h in (f.server, *f.clients) for p in (h.labelled, h.unlabelled) for i in p}


def test_a_federation_with_validation_is_stored_whole(tmp_path: Path) -> None:
    f, labels = made([20, 10], [5, 10])
    out = hold_out(f, labels, 0.2, seed=0)
    out.save(tmp_path / "f.npz", labels, ["a", "b"])
    read = Federation.load(tmp_path / "f.npz")
    assert read.fingerprint == out.fingerprint != f.fingerprint and read.spec["validation"] == 0.2
    assert [c.validation.tolist() for c in read.clients] == [c.validation.tolist() for c in out.clients]
    moved = dataclasses.replace(out, clients=(dataclasses.replace(out.clients[0], validation=EMPTY), out.clients[1]))
    assert moved.fingerprint != out.fingerprint
    listed, summary = table(out, labels, ["a", "b"])
    assert [row["validation"] for row in listed] == [6, 3] and summary["validation_total"] == 9
    assert "validation" not in table(f, labels, ["a", "b"]).rows[0]
    assert "validation" not in f.arrays()


@pytest.mark.parametrize("amount, parties, told", [
    (0.1, ([4], [3, 1]), "validation=0.1 holds no label out: the 2 parties with labels have at most 4 each; give a larger share, a count, or more labels."),
    (7, ([4], [3, 1]), "validation=7 of 8 labels, of which 6 can be held out (each party keeps one to train on); hold out fewer, or label more."),
])  # fmt: skip
def test_too_few_labels(amount: float, parties: Any, told: str) -> None:
    with pytest.raises(UserError) as error:
        hold_out(*made(*parties), amount, seed=0)
    assert str(error.value) == told


def test_who_is_told_what() -> None:
    f, labels = made([200, 200], [1], [1])
    assert sentences(f) == []
    assert sentences(hold_out(f, labels, 0.25, seed=0)) == [
        "validation: 100 of 402 labels are held out of training",
        "validation: 2 clients have too few labels to hold one out, and train on all of them (site 1, site 2)",
    ]
    few = sentences(hold_out(*made([40, 40]), 0.25, seed=0))
    assert few == ["validation: 20 of 80 labels are held out of training; on so few its accuracy moves in steps of 5.0 points"]


# -- a run ---------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fallow.run(out=tmp_path_factory.mktemp("runs"), **KEYS)


def held_rows(path: Path) -> np.ndarray:
    f = Federation.load(path / "federation.npz")
    return np.concatenate([f.server.validation, *(c.validation for c in f.clients)])


def test_nothing_learns_from_what_is_held_out(run: Any, tmp_path: Path) -> None:
    """With noise in the place of these images all is the same but for the validation itself."""
    source, held = few_digits(), held_rows(run.path)
    images = source.train.images.clone()
    images[held] = torch.randint(0, 256, images[held].shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    changed = dataclasses.replace(source, train=ImageSet(images, source.train.labels))
    other = fallow.run(out=tmp_path, **KEYS | {"data": changed})
    assert len(held) == 24 and weights(other.path) == weights(run.path)
    apart = [{k for k in one if one[k] != two[k]} for one, two in zip(rows(run.path), rows(other.path))]
    assert all(found <= {"validation_accuracy", "validation_loss"} for found in apart) and any(apart)


def test_validation_is_that_of_the_model_on_these_images(run: Any) -> None:
    source, held = few_digits(), held_rows(run.path)
    p = Predictor(run, "cpu").batches(list(source.train.images[held])).double()
    truth, last = source.train.labels[held], rows(run.path)[-1]
    right = p.argmax(1) == truth
    assert last["validation_accuracy"] == float(right.double().mean())
    assert last["validation_loss"] == pytest.approx(float(-p[range(len(truth)), truth].log().mean()), rel=1e-5)
    scores = run.summary["scores"]
    assert scores["validation"]["samples"] == 24 and scores["validation"]["accuracy"] == last["validation_accuracy"]
    f, sites, start = Federation.load(run.path / "federation.npz"), scores["sites"], 0
    assert sites["of"] == "validation" and sites["names"] == ["0", "1", "2", "3"]
    for c, count, accuracy in zip(f.clients, sites["samples"], sites["accuracy"]):
        assert count == len(c.validation) and accuracy == pytest.approx(float(right[start : start + count].double().mean()))
        start += count


def test_the_best_round_is_kept(run: Any, tmp_path: Path) -> None:
    """The most right; among those the least loss. Its weights are those of a run that was stopped there."""
    found = rows(run.path)
    best = max(found, key=lambda r: (r["validation_accuracy"], -r["validation_loss"]))
    told = run.summary["validation"]
    assert (told["best_round"], told["best"], told["loss"]) == (best["round"], best["validation_accuracy"], best["validation_loss"])
    assert told["test"]["accuracy"] == best["accuracy"] and told["test"]["macro_f1"] == best["macro_f1"]
    stopped = fallow.run(out=tmp_path, stop_after=best["round"], **KEYS)
    assert weights(stopped.path) == best_weights(run.path)
    tested = Predictor(run, "cpu", best=True).batches(list(few_digits().test.images)).argmax(1)
    assert float((tested == few_digits().test.labels).double().mean()) == best["accuracy"]


def test_better_is_more_right_then_less_loss_then_earlier() -> None:
    one = Best(3, 0.5, 1.0, None)
    assert one.beats(None) and Best(4, 0.6, 9.0, None).beats(one) and Best(4, 0.5, 0.9, None).beats(one)
    assert not Best(4, 0.5, 1.0, None).beats(one) and not Best(4, 0.4, 0.1, None).beats(one)


def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation that is best in round 2 of 5."""
    from fallow.engine.evaluating import Validation

    original = Validation.test

    def test(self: Any, number: int, state: Any) -> Any:
        logits, self.logits = self.logits, lambda _: 20.0 * torch.eye(10)[self.truth].roll(abs(number - 2), 0)
        try:
            return original(self, number, state)
        finally:
            self.logits = logits

    monkeypatch.setattr(Validation, "test", test)


@pytest.mark.parametrize("every", [1, 3])
def test_resumed_it_keeps_the_same_best(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, interrupted before a commit and run through, with checkpoints in every round and in some."""
    falling(monkeypatch)
    keys = KEYS | {"rounds": 5, "checkpoint_every": every, "optimizer_state": "keep"}
    through = fallow.run(out=tmp_path, name="through", **keys)
    assert through.summary["validation"]["best_round"] == 2
    path = fallow.run(out=tmp_path, name="run", stop_after=1, **keys).path
    assert best_weights(path) == weights(path)
    fallow.resume(path, stop_after=3)
    assert weights(path) != best_weights(path) == best_weights(through.path)
    append = RunFolder.append

    def killed(self: Any, row: Any) -> None:
        append(self, row)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "append", killed)
        fallow.resume(path)
    assert fallow.resume(path).summary["validation"] == through.summary["validation"]
    same(path, through.path)
    assert [p.name for p in (path / "best").iterdir()] == ["2.safetensors"]


def test_the_best_rounds_weights_are_vouched_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fallow.run(out=tmp_path, **KEYS).path
    best = best_weights(path)
    (path / "best.safetensors").write_bytes(best[:-1] + bytes([best[-1] ^ 1]))  # type: ignore[index]
    with pytest.raises(UserError, match=r"best\.safetensors is damaged; restore it from a copy, or write it anew with `fallow resume"):
        fallow.load(path).model(best=True)
    fallow.resume(path)
    assert best_weights(path) == best
    (path / "best.safetensors").unlink()
    fallow.resume(path)
    assert best_weights(path) == best
    kept = next((path / "best").iterdir())
    kept.write_bytes(b"other")
    (path / "summary.json").unlink()
    with pytest.raises(UserError, match=f"{kept.name} is damaged"):
        fallow.resume(path)


def test_a_round_that_fails_after_its_test_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = Run(RunFolder(tmp_path), *prepare(None, KEYS)).federated
    f.round(0)
    best = f.validation.best
    assert best is not None
    best.accuracy = -1.0  # the next is better

    def unsound(self: Any) -> None:
        raise UserError("some number is none", "lower lr")

    with monkeypatch.context() as patch, pytest.raises(UserError):
        patch.setattr(type(f), "_refuse_unsound", unsound)
        f.round(1)
    assert f.validation.best is best
    f.round(1)
    assert f.validation.best.round == 2  # type: ignore[union-attr]


def test_slots_do_not_matter(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    machine.pool.cache_clear()
    same(fallow.run(out=tmp_path, **KEYS | {"slots": 2}).path, run.path)


def test_what_a_party_has(tmp_path: Path) -> None:
    f = Run(RunFolder(tmp_path), *prepare(None, KEYS)).federated
    party = Party(f.simulation.site(2), None, Job(2, 0, {}))  # type: ignore[arg-type]
    assert len(party.validation) and party.validation.y.tolist() == f.simulation.labels[party.validation.rows].tolist()  # type: ignore[union-attr]
    assert not np.isin(party.validation.rows, party.labelled.rows).any()


def test_without_it_nothing_is_held_out(tmp_path: Path, fallow_cli: Any) -> None:
    path = fallow.run(out=tmp_path, **KEYS | {"validation": None}).path
    assert not (path / "best").exists() and best_weights(path) is None
    assert "validation_accuracy" not in rows(path)[0] and "validation" not in fallow.load(path).summary
    for words in (("export", "--best"), ("predict", str(tmp_path), "--best")):
        told = fallow_cli(words[0], str(path), *words[1:])
        if words[0] == "predict":
            (tmp_path / "a.png").write_bytes(b"")
            told = fallow_cli(words[0], str(path), *words[1:])
        assert told.sentence == f"{path} kept no best round; run it with validation=0.1, which holds labels out to find it."


def test_it_is_no_part_of_the_hash_where_it_is_not_given() -> None:
    plain, held = (resolve({}, {"method": "fedavg"} | more)[1] for more in ({}, {"validation": 0.1}))
    keys = {k: v for k, v in plain.model_dump(mode="json").items() if k not in {"validation"} | UNHASHED | set(NEWER)}
    assert config_hash(plain) == hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16] != config_hash(held)


# -- the command line ------------------------------------------------------------------------------------------------------
def test_the_best_round_is_told_exported_and_predicts(fallow_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    falling(monkeypatch)
    words = [f"{k}={v}" for k, v in (KEYS | {"rounds": 3}).items()]
    ended = fallow_cli("run", *words, "--name", "run")
    result = fallow.load("runs/run")
    test = result.summary["validation"]["test"]["accuracy"]
    assert "validation: 24 of 120 labels are held out of training; on so few" in ended.out
    assert f"best round by validation: 2, 100.00 %; test accuracy there {100 * test:.2f} % (best.safetensors)" in ended.out
    assert fallow_cli("export", "runs/run", "--best", "--format", "safetensors", "-o", "out").code == 0
    assert weights(Path("out")) == best_weights(result.path) != weights(result.path)
    card = Path("out/README.md").read_text()
    assert f"The weights are those of round 2, with {100 * test:.2f} % of the test set" in card
    assert "24 labelled ones held out for validation" in card
    assert fallow.load("out").summary["exported_round"] == 2
    last = fallow_cli("export", "runs/run", "--format", "safetensors", "-o", "last")
    assert last.code == 0 and weights(Path("last")) == weights(result.path)
    assert "| `3` | 100.00 |" not in card and "| class | accuracy, % |" in Path("last/README.md").read_text()
    Path("images").mkdir()
    for i, image in enumerate(few_digits().test.images[:20]):
        Image.fromarray(image[0].numpy()).save(f"images/{i:02}.png")
    told = {}
    for name, source, more in (("best", "runs/run", ["--best"]), ("out", "out", []), ("last", "runs/run", [])):
        assert fallow_cli("predict", source, "images", "-o", f"{name}.csv", *more).code == 0
        told[name] = Path(f"{name}.csv").read_text()
    assert told["best"] == told["out"] != told["last"]
    shutil.rmtree("images")
