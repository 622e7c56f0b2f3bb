"""Scores on the report's page: what it takes of a summary, and what it draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

import fallow
from fallow.report import page, payload, scored

TEST = {
    "samples": 4, "accuracy": 0.75, "balanced_accuracy": 0.8, "macro_f1": 0.7, "auroc": None, "calibration_error": 0.1234567,
    "class_accuracy": [1.0, None], "confusion": [[3, 0], [1, 0]],
    "calibration": {"samples": [0, 4], "confidence": [None, 0.9], "accuracy": [None, 0.75]},
}  # fmt: skip
SITES = {"of": "test", "names": ["a", "b"], "samples": [3, 1], "accuracy": [1.0, 0.0]}
SUMMARY = {"scores": {"test": TEST, "sites": SITES}, "validation": {"best": 0.5, "best_round": 3, "test": {"accuracy": 0.75}}}


def changed(**more: Any) -> dict[str, Any]:
    return {"scores": {"test": TEST | more}}


def test_what_the_page_takes() -> None:
    found = scored.scores(SUMMARY)
    assert found["test"] == {
        "accuracy": 0.75, "balanced_accuracy": 0.8, "macro_f1": 0.7, "calibration_error": 0.123457, "by_class": [1.0, None],
        "confusion": TEST["confusion"], "calibration": TEST["calibration"],
    }  # fmt: skip
    assert found["sites"] == SITES | {"all": 2} and found["best"] == {"accuracy": 0.5, "round": 3, "test": 0.75}
    assert "validation" not in found


@pytest.mark.parametrize("summary", [
    {}, {"scores": None}, {"scores": []}, {"scores": {"test": 3}}, {"scores": {"test": {}}}, {"scores": {"test": {"accuracy": "x"}}},
    {"scores": {"sites": {"names": ["a"], "samples": [1, 2], "accuracy": [1.0]}}}, {"scores": {"sites": {"names": "a"}}},
    {"validation": 7}, {"validation": {"best": True, "best_round": 1}}, {"validation": {"best": float("nan"), "best_round": 1}},
])  # fmt: skip
def test_what_is_no_score_is_left_out(summary: dict[str, Any]) -> None:
    assert scored.scores(summary) == {}


@pytest.mark.parametrize("confusion", [None, 5, [[1, 2]], [[1, 2], [3]], [[1, -1], [0, 0]], [[1, 0.5], [0, 0]], [[1, 2], None]])
def test_a_matrix_must_be_one(confusion: Any) -> None:
    assert scored.scores(changed(confusion=confusion))["test"]["confusion"] is None


def test_bins_must_be_of_one_length() -> None:
    for bins in (None, {}, {"samples": [1], "confidence": [0.5], "accuracy": []}, {"samples": 1, "confidence": 1, "accuracy": 1}):
        assert scored.scores(changed(calibration=bins))["test"]["calibration"] is None


def test_more_than_a_page_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored, "SITES", 2)
    monkeypatch.setattr(scored, "CLASSES", 1)
    many = {"names": list("abcd"), "samples": [1, 2, 3, 4], "accuracy": [0.1, 0.2, 0.3, 0.4]}
    found = scored.scores({"scores": {"test": TEST, "sites": many}})
    assert found["sites"] == {"names": ["a", "c"], "samples": [1, 3], "accuracy": [0.1, 0.3], "of": "test", "all": 4}
    assert found["test"]["confusion"] is None


def test_a_run_on_the_page(tmp_path: Path) -> None:
    """Accuracy by class stands in the last round where the key `measure` has none; a run that goes on has no scores."""
    keys = TINY | {"method": "fedavg", "validation": 0.2}
    run = fallow.run(out=tmp_path, **keys)
    shown = payload.payload([run.path])["runs"][0]
    test = run.summary["scores"]["test"]
    assert shown["scores"]["test"]["confusion"] == test["confusion"] and shown["scores"]["sites"]["of"] == "validation"
    assert shown["vectors"]["class_accuracy"]["round"] == [2]
    assert shown["vectors"]["class_accuracy"]["values"][0] == pytest.approx(test["class_accuracy"], rel=1e-5)
    assert shown["scores"]["best"]["round"] == run.summary["validation"]["best_round"]
    json.dumps(page.page(payload.payload([run.path])))
    measured = fallow.run(out=tmp_path, measure=["classes"], **keys)
    assert payload.payload([measured.path])["runs"][0]["vectors"]["class_accuracy"]["round"] == [1, 2]
    (run.path / "summary.json").unlink()
    going = payload.payload([run.path])["runs"][0]
    assert going["scores"] == {} and "class_accuracy" not in going["vectors"]
