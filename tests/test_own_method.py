"""A method of one's own in a file outside the package, as a user writes one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from conftest import HERE, TINY, rows, same

import fallow
from fallow import machine
from fallow.engine.strict import guarded
from fallow.methods import find

EXAMPLE = HERE.parent / "examples" / "my_method.py"
WORDS = [f"{k}={v}" for k, v in (TINY | {"rounds": 3, "norm": "bn"}).items()]


def test_it_is_short() -> None:
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(code) <= 40


def test_it_runs_and_resumes(tmp_path: Path, fallow_cli: Any) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    method = ["method=./my_method.py:MyMethod", "sharpness=0.3"]
    through = fallow_cli("run", *method, *WORDS, "--name", "through")
    assert through.code == 0, through.err
    assert fallow_cli("run", *method, *WORDS, "--name", "run", "--stop-after", "1").code == 0
    assert fallow_cli("resume", "runs/run").code == 0
    same(Path("runs/run"), Path("runs/through"))
    config = yaml.safe_load(Path("runs/run/config.yaml").read_text())
    assert config["method"] == "./my_method.py:MyMethod"
    assert (config["sharpness"], config["teacher_decay"], config["rounds"]) == (0.3, 0.9, 3)
    assert all(r["label_accuracy_all"] is not None and r["label_ratio"] == 1 for r in rows(Path("runs/run")))
    assert len(list(Path("runs/run/keep").iterdir())) > 0  # the teachers
    listed = fallow_cli("run", *method, "--help")
    assert listed.code == 0 and "Mean teacher" in listed.out and "sharpness" in listed.out and "beta" in listed.out


def test_its_key_matters_and_mistakes_are_told(tmp_path: Path, fallow_cli: Any) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    results = []
    for beta in (0.0, 2.0):
        assert fallow_cli("run", f"sharpness={beta}", "method=my_method.py:MyMethod", *WORDS, "--name", f"b{beta}").code == 0
        results.append(Path(f"runs/b{beta}/model.safetensors").read_bytes())
    assert results[0] != results[1]
    own = "method=./my_method.py:MyMethod"
    assert fallow_cli("run", own, "sharpnes=1").sentence == "there is no key 'sharpnes'; did you mean 'sharpness'?"
    assert fallow_cli("run", own, "sharpness=-1").sentence.startswith("sharpness=-1 is not allowed; give 0 or more (")
    assert "is not defined for labels=all; it works with labels=clients, server, some" in fallow_cli("run", own, "labels=all").sentence
    assert fallow_cli("run", "method=./my_method.py:Mine").sentence.startswith("my_method.py has no method class 'Mine'; name a class")
    assert fallow_cli("run", "method=./mine.py:Mine").sentence == "there is no file mine.py for the method Mine; check the path before the colon."
    (tmp_path / "broken.py").write_text("class Broken(\n    def\n")
    assert fallow_cli("run", "method=./broken.py:Broken").sentence.startswith("broken.py is not valid Python in line ")


def test_it_could_be_captured_and_runs_in_slots(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    machine.pool.cache_clear()
    name = f"{EXAMPLE}:MyMethod"
    kind = find(name)
    keys = TINY | {"method": name, "labels": "some"}
    plain = fallow.run(out=tmp_path, **keys)
    same(fallow.run(out=tmp_path, **keys | {"slots": 2}).path, plain.path)
    assert kind.captured and callable(guarded(kind.step))
    model = plain.model()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
