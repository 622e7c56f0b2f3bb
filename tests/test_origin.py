"""What a run was made from is compared, own code needs the user's word, and both forms of naming it work alike."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, few_digits, same

import fallow
from fallow import own
from fallow.errors import UserError
from fallow.runs.origin import data_digests

METHOD = """
from helper_of_{tag} import SCALE
from fallow.methods.fedavg import FedAvg
open({log!r}, "a").write("method\\n")
class Mine(FedAvg):
    paper = "Mine et al."
class Other:
    pass
"""
MODEL = """
from torch import nn
open({log!r}, "a").write("model\\n")
class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.linear = nn.Linear(channels * 64, classes)
    def forward(self, x):
        return self.linear(x.flatten(1))
class Broken(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.linear = nn.Linear(channels, missing)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow_cli: Any) -> Path:
    """A folder with data, a method, its helper and a model; they write down when they are run."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FALLOW_HOME", str(tmp_path / "home"))
    here, tag = tmp_path / "here", hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]
    here.mkdir()
    (here / f"helper_of_{tag}.py").write_text("SCALE = 1\n")
    (here / f"mine_{tag}.py").write_text(METHOD.format(tag=tag, log=str(tmp_path / "log")))
    (here / f"nets_{tag}.py").write_text(MODEL.format(log=str(tmp_path / "log")))
    source = few_digits()
    arrays = {"images": source.train.images, "labels": source.train.labels, "test_images": source.test.images, "test_labels": source.test.labels}
    np.savez(here / "digits.npz", **{k: v.numpy() for k, v in arrays.items()})
    monkeypatch.chdir(here)
    return here


def name_of(place: Path, stem: str) -> str:
    return next(p.stem for p in place.glob(f"{stem}_*.py"))


def keys(place: Path, **more: Any) -> dict[str, Any]:
    return TINY | {"data": "numpy:digits.npz", "method": f"./{name_of(place, 'mine')}.py:Mine"} | more


def strange() -> None:
    """As if this were another user's account and process."""
    own._named.clear()
    own._homes.clear()
    own.trusted_list().unlink(missing_ok=True)


def log(place: Path) -> list[str]:
    path = place.parent / "log"
    return path.read_text().split() if path.exists() else []


def rewrite(place: Path, **changes: Any) -> None:
    with np.load(place / "digits.npz") as f:
        arrays = dict(f)
    for part, change in changes.items():
        arrays[part] = change(arrays[part])
    np.savez(place / "digits.npz", **arrays)


# -- digests -----------------------------------------------------------------------------------------------------------
def test_digests_tell_every_part(place: Path) -> None:
    source = few_digits()
    found = data_digests(source)
    by_hand = hashlib.sha256(b"|u1 (240, 1, 8, 8)" + source.train.images.numpy().tobytes()).hexdigest()
    assert found["training images"] == by_hand
    source.test.labels[3] += 1
    changed = data_digests(source)
    assert [k for k in found if found[k] != changed[k]] == ["test labels"]


@pytest.mark.parametrize(
    "part, words",
    [("images", "training images"), ("labels", "training labels"), ("test_images", "test images"), ("test_labels", "test labels")],
)
def test_other_data_is_named_and_taken_only_anyway(part: str, words: str, place: Path) -> None:
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place, method="fedavg")).path
    before = json.loads((run / "origin.json").read_text())
    rewrite(place, **{part: lambda a: a[::-1].copy()})
    with pytest.raises(UserError, match=rf"of the data set .* the {words} are not as when the run was begun; .*--anyway"):
        fallow.resume(run)
    assert fallow.resume(run, anyway=True).summary["status"] == "finished"
    after = json.loads((run / "origin.json").read_text())
    assert after["data"] == before["data"] and words in after["changed"][0]["differs"][0] and after["changed"][0]["after_round"] == 1


def test_data_of_another_shape_cannot_be_taken_at_all(place: Path) -> None:
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place, method="fedavg")).path
    rewrite(place, images=lambda a: a[:200], labels=lambda a: a[:200])
    with pytest.raises(UserError, match="training images and training labels are not as when the run was begun; put the old files back, or start a new run"):
        fallow.resume(run, anyway=True)


def test_an_edited_key_is_named(place: Path, fallow_cli: Any) -> None:
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place, method="fedavg")).path.resolve()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("model: small-cnn", "model: resnet9"))
    said = fallow_cli("resume", str(run)).sentence
    assert "config.yaml has model=resnet9 where the run was begun with model=small-cnn" in said
    assert fallow_cli("resume", str(run), "--anyway").sentence == said  # other settings are another run
    (run / "config.yaml").write_text(text.replace("slots: 1", "slots: 2").replace("rank_timeout: 600.0", "rank_timeout: 60.0"))
    assert fallow_cli("resume", str(run)).code == 0  # what changes no result may change


def test_a_damaged_record_is_told(place: Path, fallow_cli: Any) -> None:
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place, method="fedavg")).path.resolve()
    whole = (run / "origin.json").read_text()
    for text in ("{", "[]", "null", whole.replace('"started_in"', '"begun_in"'), whole.replace("here", "hare", 1)):
        (run / "origin.json").write_text(text)
        assert "origin.json is damaged" in fallow_cli("resume", str(run)).sentence


# -- own code ----------------------------------------------------------------------------------------------------------
def test_own_code_is_copied_compared_and_found_from_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, nets = name_of(place, "mine"), name_of(place, "nets")
    through = fallow.run(out="runs", name="through", **keys(place, model=f"{nets}:Net"))
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place, model=f"{nets}:Net")).path.resolve()
    helper = next(place.glob("helper_of_*.py"))
    assert sorted(p.name for p in (run / "own").rglob("*.py")) == sorted([helper.name, f"{method}.py", f"{nets}.py"])
    assert (run / "own" / "method" / helper.name).read_bytes() == helper.read_bytes()
    assert log(place) == ["method", "model"], "once per content and process"
    other = place.parent / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    (other / f"{method}.py").write_text("raise SystemExit('another file of the name')")
    (other / "digits.npz").write_bytes(b"another file of the name")
    helper.write_text("SCALE = 2\n")
    with pytest.raises(UserError, match=f"the method's file .*{helper.name} is not as it was when the run was begun; .*own.*--anyway"):
        fallow.resume(run)
    helper.write_text("SCALE = 1\n")
    same(fallow.resume(run).path, through.path if through.path.is_absolute() else place / through.path)


@pytest.mark.parametrize("line", ["import helper", "from importlib import import_module as f; f('helper')", "__import__('helper')", "from helper import x"])
@pytest.mark.parametrize("file", ["helper.py", "helper/__init__.py", f"helper{EXTENSION_SUFFIXES[0]}", "helper.pyc"])
def test_neighbours_are_part_of_own_code(file: str, line: str, tmp_path: Path) -> None:
    """The file is among them that Python would take, however it is asked for."""
    (tmp_path / "mine.py").write_text(f"{line}\nclass Mine: ...\n")
    for name in ([] if file == "helper.pyc" else ["helper.py"]) + [file]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    assert own.find(f"{tmp_path}/mine.py:Mine", "method").files.keys() == {"mine.py", file}
    assert PathFinder.find_spec("helper", [str(tmp_path)]).origin == str(tmp_path / file)  # type: ignore[union-attr]


def test_a_received_folder_runs_no_code(place: Path, fallow_cli: Any) -> None:
    method, nets = name_of(place, "mine"), name_of(place, "nets")
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place, model=f"./{nets}.py:Net")).path.resolve()
    ran = log(place)
    own._run.clear()
    strange()
    photos = place / "photos"
    photos.mkdir()
    from PIL import Image

    Image.new("L", (8, 8)).save(photos / "a.png")
    for command in (["resume", str(run)], ["predict", str(run), str(photos)], ["export", str(run)]):
        said = fallow_cli(*command).sentence
        assert "names code that would run with your rights" in said and "--trust" in said
        assert str(place / f"{nets if command[0] != 'resume' else method}.py") in said
    for command in (["compare", str(run)], ["report", str(run)]):
        assert fallow_cli(*command).code == 0
    assert log(place) == ran, "nothing was run"
    assert fallow_cli("predict", str(run), str(photos), "--trust").code == 0
    assert log(place) == [*ran, "model"], "the method is not needed"
    assert fallow_cli("resume", str(run), "--trust").code == 0
    own._named.clear()  # another process of the same user, who has trusted it
    assert fallow_cli("export", str(run), "--format", "safetensors").code == 0
    assert "Mine et al." in (run / "export" / "README.md").read_text()


OTHERS = "import sys\nsys.modules['ran_{tag}'] = sys\n"


@pytest.mark.parametrize("form", ["mine_{tag}.py:Mine", ":mine_{tag}:Mine"])
@pytest.mark.parametrize("trust", [False, True])
def test_what_lies_beside_received_code_is_not_found(trust: bool, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content is known, and a package that somebody imports where it is installed comes along: it would run unseen."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("FALLOW_HOME", str(tmp_path / "home"))
    tag = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]
    for folder in (tmp_path / "own", tmp_path / "received"):
        folder.mkdir()
        (folder / f"mine_{tag}.py").write_text(f"import part_{tag}, lot_{tag}.x\nclass Mine: part = part_{tag}.x + lot_{tag}.x.y\n")
        (folder / f"part_{tag}.py").write_text("x = 1\n")
        (folder / f"lot_{tag}").mkdir()
        (folder / f"lot_{tag}" / "x.py").write_text("y = 2\n")
        (folder / f"tracker_{tag}.py").write_text(OTHERS.format(tag=tag))
    if not trust:
        own.named(f"{tmp_path}/own/mine_{tag}.py:Mine", "method")
    name = f"{tmp_path}/received/{form.format(tag=tag)}"
    own.check(name, "method", "the run", trust)
    assert own.load(name, "method")[0].part == 3
    with pytest.raises(ImportError):
        __import__(f"tracker_{tag}")
    own.named(name, "method")  # who names it himself has its folder, too
    own.forget(name, "method")
    assert own.load(name, "method")[0].part == 3 and __import__(f"tracker_{tag}") and f"ran_{tag}" in sys.modules


def test_a_recipe_from_elsewhere_runs_no_code(place: Path, fallow_cli: Any) -> None:
    method, nets = place / f"{name_of(place, 'mine')}.py", place / f"{name_of(place, 'nets')}.py"
    words = [f"{k}={v}" for k, v in (TINY | {"rounds": 1}).items()]
    for line in (f"method: {method}:Mine", f"model: {nets}:Net", f"readings: {{recommended: {{model: '{nets}:Net'}}}}"):
        Path("recipe.yaml").write_text(f"{line}\n")
        for command in ("run", "split"):
            said = fallow_cli(command, "recipe.yaml", *words).sentence
            assert said.startswith("the recipe names code that would run with your rights, the m") and ".py:" in said, said
    assert log(place) == []
    Path("recipe.yaml").write_text(f"method: {method}:Mine\n")
    assert fallow_cli("run", "recipe.yaml", *words, "--trust").code == 0
    strange()
    assert fallow_cli("run", "recipe.yaml", f"method={method}:Mine", *words).code == 0  # named on this command line


def test_predict_uses_the_model_as_it_was(place: Path) -> None:
    nets = place / f"{name_of(place, 'nets')}.py"
    result = fallow.run(out="runs", name="run", **keys(place, method="fedavg", model=f"./{nets.name}:Net"))
    nets.write_text(nets.read_text() + "\nraise SystemExit\n")
    assert sum(p.numel() for p in fallow.load(result.path).model().parameters()) == 650
    nets.unlink()
    assert fallow.load(result.path).model()
    copy = next((result.path / "own" / "model").iterdir())
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(UserError, match="nor is the copy"):
        fallow.load(result.path).model()


@pytest.mark.parametrize("form", ["./{}.py", "{}.py", "{}"])
def test_both_forms_name_methods_and_models(form: str, place: Path, fallow_cli: Any) -> None:
    method, nets = form.format(name_of(place, "mine")), form.format(name_of(place, "nets"))
    words = [f"{k}={v}" for k, v in (TINY | {"rounds": 1}).items()]
    told = fallow_cli("run", f"method={method}:Mine", f"model={nets}:Net", *words, "--name", "run")
    assert told.code == 0, told.err
    assert log(place) == ["method", "model"]


MISTAKES = {
    "import nothere": "line 1 of own.py fails (ModuleNotFoundError: No module named 'nothere'); install what it imports, or mend the file.",
    "x = 1\nx = (": "own.py is not valid Python in line 2 ('(' was never closed); mend the file.",
    "x = 1\n\n1 / 0": "line 3 of own.py fails (ZeroDivisionError: division by zero); mend the file.",
    "import sys\nsys.exit(0)": "line 2 of own.py fails (SystemExit: 0); mend the file.",
    "Mine = 3": "",
    "class Mine: pass": "",
    "": "",
}


@pytest.mark.parametrize("what", ["method", "model"])
@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_own_files(text: str, what: str, place: Path, fallow_cli: Any) -> None:
    Path("own.py").write_text(text)
    said = fallow_cli("run", f"{what}=own.py:Mine", "rounds=1", "data=few-digits").sentence
    assert said == MISTAKES[text] or (not MISTAKES[text] and said.startswith("own.py")), said
    assert not list(Path(".").glob("runs/*"))


@pytest.mark.parametrize("name", [":X", "x.py:", "a..b:X", ".x:Y", "no_such_module:X", "no/such.py:X", "~nobody/x.py:X", "os:getcwd", "a b:C", "/:X", "x:y:z"])
@pytest.mark.parametrize("what", ["method", "model"])
def test_names_that_name_nothing(what: str, name: str, fallow_cli: Any) -> None:
    assert fallow_cli("run", f"{what}={name}", "rounds=1").sentence


def test_a_model_that_cannot_be_built(place: Path, fallow_cli: Any) -> None:
    file = f"{name_of(place, 'nets')}.py"
    line = (place / file).read_text().splitlines().index("        self.linear = nn.Linear(channels, missing)") + 1
    assert f"line {line} of " in (said := fallow_cli("run", f"model={file}:Broken", "rounds=1").sentence) and "'missing'" in said


def test_a_lost_record_is_told(place: Path) -> None:
    run = fallow.run(out="runs", name="run", stop_after=1, **keys(place)).path
    (run / "origin.json").unlink()
    with pytest.raises(UserError, match="is missing"):
        fallow.resume(run)
