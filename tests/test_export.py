"""Exported models answer as the run's own; the card tells what is needed to use them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TINY, few_digits

import fallow
from fallow.export import export, formats
from fallow.runs import Result

pytestmark = pytest.mark.xdist_group("graphs")  # torch.export takes seconds to load, once per worker
KEYS = TINY | {"method": "fedavg", "labels": "clients", "rounds": 2, "lr": 0.1}


def run(tmp_path: Path, **keys: Any) -> Result:
    return fallow.run(out=tmp_path, name="run", **KEYS | keys)


def images_of_test() -> torch.Tensor:
    return few_digits().test.images


def blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.S)


def probabilities(code: str, folder: Path, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the card's code makes of some images, run in the exported folder."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"images": images}
    exec(code, names)
    return names["probabilities"]


@pytest.mark.parametrize("norm", ["bn", "bn-batch"])
def test_the_cards_code_gives_the_runs_own_answers(norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, images = run(tmp_path, norm=norm), images_of_test()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no ONNX, wherever this runs
    done = export(result.path)
    assert done.path == result.path / "export" and "model.pt2" in done.files
    assert done.left_out == ["model.onnx was not written: ONNX needs the package onnx, which is not installed"]
    with torch.no_grad():  # x = (pixels / 255 - 1/2) / (1/2): digits have no preset
        expected = result.model()(images.float() / 127.5 - 1).softmax(1)
    best, second = expected.topk(2).values.unbind(1)
    open_to_doubt = float((best - second < 1e-4).double().mean())  # rounding may tip which class these have
    right = float((expected.argmax(1) == few_digits().test.labels).double().mean())
    assert open_to_doubt < 0.1 and right == pytest.approx(result.accuracy, abs=open_to_doubt + 1e-6)
    card = (done.path / "README.md").read_text()
    plain, own = blocks(card)
    assert "fallow" not in plain
    for code in (plain, own):
        found = probabilities(code, done.path, images, monkeypatch)
        assert torch.allclose(found, expected, atol=1e-5)
    assert ("Give images together" in card) == (norm == "bn-batch")
    few = torch.export.load(done.path / "model.pt2").module()(images[:7])  # any number of images
    assert few.shape == (7, 10)


def test_the_card(tmp_path: Path) -> None:
    result = run(tmp_path, norm="gn", active_seed=4, image={"size": 12, "fit": "pad", "channels": 3, "normalise": "usb"}, eval_every=2, rounds=3, checkpoint_every=1)
    done = export(result.path, tmp_path / "here", format="safetensors")
    assert sorted(done.files) == ["README.md", "config.yaml", "model.safetensors", "summary.json"] and not done.left_out
    text, s = (done.path / "README.md").read_text(), result.summary
    front = yaml.safe_load(text.split("---")[1])
    assert front["pipeline_tag"] == "image-classification"
    measured = front["model-index"][0]["results"][0]["metrics"]
    assert measured[0] == {"type": "accuracy", "value": round(s["last"], 6)}
    assert {"type": "f1", "value": round(s["scores"]["test"]["macro_f1"], 6), "name": "macro F1"} in measured
    for told in (
        s["config_hash"], s["fingerprint"], "McMahan et al., AISTATS 2017", "small-cnn", "0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        "40 labelled and 200 unlabelled", "an image that is not 8x8", "the grey channel is repeated three times",
        "padded with zeros on all sides to 12x12", "uint8 [N, 3, 12, 12]", "x = (pixels / 255 - 0.5) / 0.5",
        f"{100 * s['last']:.2f} % of the test set", "3 of 3 (finished)", "norm `gn` |", "| seed | 0, active_seed=4 |",
    ):  # fmt: skip
        assert told in text, told
    assert yaml.safe_load((done.path / "config.yaml").read_text())["data_dir"] is None
    again = fallow.load(done.path)  # the folder stands in for the run
    assert again.accuracy == result.accuracy
    assert (done.path / "model.safetensors").read_bytes() == (result.path / "model.safetensors").read_bytes()


def test_a_stopped_run_says_which_round_was_tested(tmp_path: Path) -> None:
    stopped = fallow.run(out=tmp_path, stop_after=3, **KEYS | {"rounds": 4, "eval_every": 2})
    text = (export(stopped.path, format="safetensors").path / "README.md").read_text()
    assert "after round 2 (the weights are those of round 3, which was not tested)" in text and "3 of 4 (stopped)" in text


OWN = '''
import torch
from torch import nn


class Forks(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.head = nn.Linear(channels * size * size, classes)

    def forward(self, x):
        z = self.head(x.flatten(1))
        return z if z.sum() > 0 else 2 * z
'''


def test_a_model_that_no_graph_can_hold(tmp_path: Path, fallow_cli: Any) -> None:
    Path("own.py").write_text(OWN)
    result = run(tmp_path, model="./own.py:Forks")
    told = fallow_cli("export", str(result.path))
    assert told.code == 0 and told.out.startswith("no graph was written: torch.export cannot trace this model (")
    assert not list((result.path / "export").glob("model.pt2"))
    assert "needs the file of the model, `./own.py:Forks`" in (result.path / "export" / "README.md").read_text()
    told = fallow_cli("export", str(result.path), "--format", "torch-export")
    assert told.sentence.endswith("; take --format safetensors.")


def test_mistakes(tmp_path: Path, fallow_cli: Any) -> None:
    result = run(tmp_path)
    assert fallow_cli("export", "nowhere").sentence == "there is no run at nowhere; give the folder of a run, such as runs/NAME."
    assert fallow_cli("export", str(result.path), "--format", "onx").sentence == "there is no format 'onx'; did you mean 'onnx'?"
    assert "is the run itself; choose another folder with -o" in fallow_cli("export", str(result.path), "-o", str(result.path)).sentence
    Path("file").write_text("")
    assert fallow_cli("export", str(result.path), "-o", "file", "--format", "safetensors").sentence == "file is a file, not a folder; choose another name with -o."
    (result.path / "model.safetensors").write_bytes(b"no")
    assert "model.safetensors is damaged" in fallow_cli("export", str(result.path)).sentence
    (result.path / "model.safetensors").unlink()
    assert "has no weights; give the folder of the run itself" in fallow_cli("export", str(result.path)).sentence


def test_a_run_of_an_older_version(tmp_path: Path, fallow_cli: Any) -> None:
    result = run(tmp_path)
    summary = result.summary
    del summary["decoded"]
    (result.path / "summary.json").write_text(json.dumps(summary))
    (result.path / "manifest.json").unlink()
    sentence = fallow_cli("export", str(result.path)).sentence
    assert sentence == f"the run {result.path} is of an older version, which did not note how images are read; run it again."


@pytest.mark.skipif(
    not all(importlib.util.find_spec(n) for n in ("onnx", "onnxscript", "onnxruntime")), reason="onnx, onnxscript, onnxruntime are not installed"
)
@pytest.mark.parametrize("keys", [{"norm": "bn"}, {"norm": "bn-batch"}])
def test_onnx(keys: dict[str, Any], tmp_path: Path) -> None:
    import onnxruntime

    result, images = run(tmp_path, **keys), images_of_test()
    done = export(result.path, format="onnx")
    session = onnxruntime.InferenceSession(done.path / "model.onnx")
    found = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    with torch.no_grad():
        expected = result.model()(images.float() / 127.5 - 1)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_model_that_onnx_cannot_hold_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such op\nand much more")

    monkeypatch.setattr(torch.onnx, "export", refuse)
    with pytest.raises(fallow.UserError, match=r"torch cannot write this model as ONNX \(no such op\); take --format torch-export"):
        formats.onnx(None)  # type: ignore[arg-type]
