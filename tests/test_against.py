"""`fallow compare` says what stands against runs, and where labels alone do better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_page import fabricated, row

from fallow.report.against import against


def made(folder: Path, method: str, accuracy: float, fingerprint: str = "same", warnings: Any = (), **more: Any) -> Path:
    path = fabricated(folder / method, [row(n + 1, accuracy, **more) for n in range(5)], method=method)
    summary = {
        "status": "finished", "rounds": 5, "classes": 10, "fingerprint": fingerprint, "warnings": list(warnings),
        "scores": {"test": {"samples": 1000}, "validation": {"samples": 1000}},
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.mark.parametrize(("accuracy", "fingerprint", "said"), [(0.53, "same", True), (0.54, "same", False), (0.53, "other", False), (0.9, "same", False)])
def test_labels_alone_that_do_better_are_named(tmp_path: Path, accuracy: float, fingerprint: str, said: bool) -> None:
    """Three standard deviations of a difference of 1000 images each are 6.57 points at 60 %."""
    made(tmp_path, "fedavg", 0.6)
    made(tmp_path, "fixmatch", accuracy, fingerprint)
    found = against([tmp_path])
    assert [line.startswith("fixmatch: labels alone do better: 60 % (fedavg) against 53 %; ") for line in found] == [True] * said


def test_the_validation_set_decides_where_there_is_one(tmp_path: Path) -> None:
    made(tmp_path, "fedavg", 0.6, validation_accuracy=0.5)
    made(tmp_path, "fixmatch", 0.5, validation_accuracy=0.5)
    assert against([tmp_path]) == []


def test_runs_of_which_the_same_is_said_stand_together(tmp_path: Path) -> None:
    warning = {"kind": "chance", "since": 1, "sentence": "it stands at chance", "remedy": "try more"}
    made(tmp_path, "fixmatch", 0.1, warnings=[warning])
    made(tmp_path, "uda", 0.1, warnings=[warning])
    assert against([tmp_path]) == ["fixmatch, uda: it stands at chance; try more"]
