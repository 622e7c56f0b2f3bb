"""Scores of predictions: by hand, by scikit-learn, and in a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, few_digits, rows
from sklearn import metrics

import fallow
from fallow.export.predict import Predictor
from fallow.measure import scores, told
from fallow.measure.scores import Counts

NAN = float("nan")

# Six samples of four classes, worked out by hand; class 3 never occurs, class 2 is never predicted.
#   truth      0 0 0 1 1 2
#   predicted  0 0 1 1 0 1
TRUTH, PREDICTED = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 0, 1])


def near(tensor: torch.Tensor, expected: Any) -> None:
    assert tensor.tolist() == pytest.approx(expected, rel=1e-12, nan_ok=True)


def counted() -> Counts:
    return scores.counts(PREDICTED, TRUTH, 4)


# -- by hand -------------------------------------------------------------------------------------------------------------
def test_counts_and_confusion_by_hand() -> None:
    n = counted()
    assert (n.hits.tolist(), n.actual.tolist(), n.predicted.tolist()) == ([2, 1, 0, 0], [3, 2, 1, 0], [3, 3, 0, 0])
    assert scores.confusion(PREDICTED, TRUTH, 4).tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_classes_by_hand() -> None:
    near(scores.class_accuracy(counted()), [2 / 3, 1 / 2, 0.0, NAN])
    near(scores.balanced_accuracy(counted()), (2 / 3 + 1 / 2 + 0) / 3)
    near(scores.macro_f1(counted()), (4 / 6 + 2 / 5 + 0 / 1) / 3)  # 2 hits / (samples + predictions)


def test_a_class_that_is_predicted_but_absent_counts_in_f1_alone() -> None:
    n = scores.counts(torch.tensor([0, 2]), torch.tensor([0, 0]), 4)
    near(scores.balanced_accuracy(n), 1 / 2)
    near(scores.macro_f1(n), (2 / 3 + 0) / 2)


def test_auroc_by_hand_with_ties() -> None:
    """Class 0: its samples have .8 and .4, the others .4, .2, .1; of six pairs five and a half are in order."""
    p = torch.tensor([[0.8, 0.1], [0.4, 0.1], [0.4, 0.1], [0.2, 0.1], [0.1, 0.1]], dtype=torch.float64)
    truth = torch.tensor([0, 0, 1, 1, 1])
    near(scores.class_auroc(p, truth), [5.5 / 6, 0.5])  # all tied: each pair counts half
    near(scores.auroc(p, truth), (5.5 / 6 + 0.5) / 2)


def test_auroc_needs_two_sides() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
    near(scores.class_auroc(p, torch.tensor([0, 2])), [1.0, NAN, 1.0])
    near(scores.class_auroc(p, torch.tensor([1, 1])), [NAN] * 3)
    near(scores.auroc(p, torch.tensor([0, 2])), 1.0)


def test_calibration_by_hand() -> None:
    """Two samples of confidence .8 and .7 of which one is right, in one bin of two: |1/2 - 3/4|; one of .5, right, in the other."""
    p = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.25, 0.25, 0.5]], dtype=torch.float64)
    found = scores.calibration(p, torch.tensor([0, 0, 2]), bins=2)
    assert found.samples.tolist() == [1, 2]  # .5 is the upper edge of the first
    near(found.confidence, [0.5, 0.75])
    near(found.accuracy, [1.0, 0.5])
    near(scores.calibration_error(found), (1 * 0.5 + 2 * 0.25) / 3)


def test_bins_have_their_upper_edge() -> None:
    """Of 16, so that edges are exact; an empty bin has no mean, and confidence 1 is in the last."""
    confidence = torch.tensor([1 / 16, 2 / 16, 2 / 16 + 1e-9, 1.0], dtype=torch.float64)
    p = torch.stack([confidence, torch.zeros(4, dtype=torch.float64)], 1)
    found = scores.calibration(p, torch.zeros(4, dtype=torch.int64), bins=16)
    assert found.samples.tolist() == [1, 1, 1] + [0] * 12 + [1]
    assert math.isnan(found.confidence[5]) and not math.isnan(scores.calibration_error(found))


def test_groups_by_hand() -> None:
    count, accuracy = scores.by_group(PREDICTED == TRUTH, torch.tensor([0, 0, 2, 2, 2, 0]), 3)
    assert count.tolist() == [3, 0, 3]
    near(accuracy, [2 / 3, NAN, 1 / 3])


# -- by scikit-learn -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("samples, classes", [(400, 2), (500, 7), (60, 20)])
def test_against_scikit_learn(samples: int, classes: int) -> None:
    rng = np.random.default_rng(samples)
    truth = rng.integers(0, classes, samples)
    z = rng.normal(size=(samples, classes)) + 1.5 * np.eye(classes)[truth]
    found = scores.full(torch.from_numpy(z), torch.from_numpy(truth))
    p, predicted = np.exp(z) / np.exp(z).sum(1, keepdims=True), z.argmax(1)
    assert found["samples"] == samples
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(truth, predicted))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(truth, predicted))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(truth, predicted, average="macro"))
    assert found["confusion"] == metrics.confusion_matrix(truth, predicted, labels=range(classes)).tolist()
    assert found["class_accuracy"] == pytest.approx(metrics.recall_score(truth, predicted, average=None).tolist())
    if classes == 2:
        assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, p[:, 1]))
    else:
        assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, p, multi_class="ovr", average="macro"))


@pytest.mark.parametrize("at_once", [2**22, 700])
def test_tied_areas_against_scikit_learn(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of five values; also where only a few columns are sorted together."""
    monkeypatch.setattr(scores, "AT_ONCE", at_once)
    rng = np.random.default_rng(3)
    truth, p = rng.integers(0, 6, 300), rng.integers(0, 5, (300, 6)) / 4
    want = [metrics.roc_auc_score(truth == c, p[:, c]) for c in range(6)]
    near(scores.class_auroc(torch.from_numpy(p), torch.from_numpy(truth)), want)


def test_calibration_against_counting_by_hand_of_each_sample() -> None:
    rng = np.random.default_rng(4)
    truth, p = rng.integers(0, 4, 200), rng.dirichlet(np.ones(4) / 2, 200)
    error = 0.0
    for b in range(15):
        inside = [i for i in range(200) if b / 15 < p[i].max() <= (b + 1) / 15]
        if inside:
            right = sum(p[i].argmax() == truth[i] for i in inside) / len(inside)
            error += len(inside) / 200 * abs(right - sum(p[i].max() for i in inside) / len(inside))
    near(scores.calibration_error(scores.calibration(torch.from_numpy(p), torch.from_numpy(truth))), error)


# -- what has no value ---------------------------------------------------------------------------------------------------
def test_nothing_is_nan() -> None:
    """Samples of one class: no area, no accuracy of the others, and JSON takes it all."""
    found = scores.full(torch.tensor([[2.0, 1.0, 0.0]] * 3), torch.zeros(3, dtype=torch.int64))
    json.dumps(found, allow_nan=False)
    assert found["auroc"] is None and found["class_accuracy"] == [1.0, None, None]
    assert found["balanced_accuracy"] == found["macro_f1"] == 1.0
    assert "AUROC" not in told.listed(found) and "macro F1 1.000" in told.listed(found)


def test_very_many_classes_have_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MATRIX_CLASSES", 2)
    assert scores.full(torch.eye(3), torch.arange(3))["confusion"] is None


# -- in a run ------------------------------------------------------------------------------------------------------------
def test_a_run_is_scored(tmp_path: Path, fallow_cli: Any) -> None:
    words = [f"{k}={v}" for k, v in (TINY | {"method": "fedavg", "rounds": 3, "eval_every": 2}).items()]
    ended = fallow_cli("run", *words, "--name", "run")
    result = fallow.load("runs/run")
    test, found = result.summary["scores"]["test"], rows(result.path)
    assert [row["macro_f1"] is None for row in found] == [True, False, False]  # where it was tested
    source = few_digits()
    truth, predicted = source.test.labels.numpy(), Predictor(result, "cpu").batches(list(source.test.images)).argmax(1).numpy()
    assert test["confusion"] == metrics.confusion_matrix(truth, predicted, labels=range(10)).tolist()
    assert test["macro_f1"] == found[-1]["macro_f1"] == pytest.approx(metrics.f1_score(truth, predicted, average="macro"))
    assert test["accuracy"] == result.accuracy
    for name in scores.EACH_TEST:
        assert test[name] == found[-1][name]
    assert told.listed(test) in ended.out and "AUROC 0." in ended.out


def test_scores_beside_each_other(tmp_path: Path, fallow_cli: Any) -> None:
    for seed in (0, 1):
        fallow.run(out=tmp_path / "runs", **TINY | {"method": "fedavg", "seed": seed, "validation": 0.2})
    found = [fallow.load(p).summary for p in sorted((tmp_path / "runs").iterdir())]
    out = fallow_cli("compare", "runs", "--scores", "macro_f1,validation.best").out.splitlines()
    assert out[0].split()[-2:] == ["macro_f1", "validation.best"]
    for line, s in zip(out[1:3], found):
        assert line.split()[-3:] == [f"{s['scores']['test']['macro_f1']:.3f}", f"{100 * s['validation']['best']:.2f}", "%"]
    by_auroc = fallow_cli("compare", "runs", "--statistic", "auroc").out
    assert f"{50 * sum(s['scores']['test']['auroc'] for s in found):.2f} ±" in by_auroc
    assert fallow_cli("compare", "runs", "--scores", "macrof1").sentence == "no run has a score 'macrof1'; did you mean 'macro_f1'?"


def test_a_run_that_is_resumed_has_the_same_scores(tmp_path: Path) -> None:
    keys = TINY | {"method": "fixmatch", "norm": "bn"}
    through = fallow.run(out=tmp_path, name="through", **keys)
    stopped = fallow.run(out=tmp_path, name="run", stop_after=1, **keys)
    assert stopped.summary["scores"]["test"]["samples"] == 60
    (stopped.path / "summary.json").unlink()
    assert fallow.resume(stopped.path).summary["scores"] == through.summary["scores"]
    (through.path / "summary.json").unlink()  # made again of the last checkpoint
    assert fallow.resume(through.path).summary["scores"] == stopped.summary["scores"]
