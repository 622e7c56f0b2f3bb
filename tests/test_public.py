"""The public names, as one meets them in Python, an editor and a notebook."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, few_digits
from PIL import Image

import fallow
from fallow.data import given, sources
from fallow.errors import UserError
from fallow.export.predict import predict
from fallow.runs import onlookers, portrait, prepare
from fallow.said import Speaker

QUICK: dict[str, Any] = TINY | {"method": "fedavg", "name": "run"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run(out: Path, **keys: Any) -> fallow.Result:
    return fallow.run(out=out, **QUICK | keys)


# -- names -------------------------------------------------------------------------------------------------------------
def test_names_are_listed_before_they_are_used() -> None:
    code = "import sys, fallow; print(sorted(set(fallow.__all__) - set(dir(fallow))), 'torch' in sys.modules, 'run' in vars(fallow))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False False\n"


def test_editors_know_every_name() -> None:
    """The imports that type checkers and editors read are those of the lazy table."""
    text = Path(fallow.__file__).read_text()
    block = re.search(r"if TYPE_CHECKING:\n((?:    .*\n)+)", text)
    assert block
    found: dict[str, str] = {}
    for module, names in re.findall(r"from (\S+) import (.+)", block[1]):
        for name in names.split(", "):
            there, _, here = name.partition(" as ")
            assert hasattr(importlib.import_module(module), there)
            found[here or there] = module
    assert found == fallow._HOMES and sorted(found) == sorted(fallow.__all__)


@pytest.mark.parametrize("name", ["", *fallow.__all__])
def test_examples_do_what_they_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    what = getattr(fallow, name) if name else fallow
    finder, runner, printed = doctest.DocTestFinder(recurse=bool(name)), doctest.DocTestRunner(optionflags=FLAGS), []
    tests = [t for t in finder.find(what, name or "fallow", module=False) if t.examples]
    assert tests and tests[0].name == (name or "fallow"), "it has no example"
    for test in tests:
        runner.run(test, out=printed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(printed)


# -- a result ----------------------------------------------------------------------------------------------------------
def test_a_result_shows_itself(tmp_path: Path) -> None:
    result = run(tmp_path, rounds=3, image={"size": 12})
    score = f"{100 * result.accuracy:.2f} %"
    assert repr(result) == f"Result('{tmp_path / 'run'}': fedavg on few-digits, {score} after round 3)"
    page = result._repr_html_()
    assert f"<b>fedavg</b> on <b>few-digits</b>: <b>{score}</b> after round 3 (best" in page
    assert "<code>image.size=12</code>" in page and "<code>clients=4</code>" in page and "momentum=" not in page  # what is not the default
    assert str(result.path) in page
    shown = re.search(r'<polyline points="([^"]+)"', page)
    assert shown and len(shown[1].split()) == 3


def test_the_curve_goes_through_its_points() -> None:
    """Left to right by round, the highest at the top; a line of one point is none."""
    rows = [{"round": 1, "accuracy": 0.25}, {"round": 2, "accuracy": None}, {"round": 3, "accuracy": 0.75}, {"round": 5, "accuracy": 0.5}]
    found = re.search(r'<polyline points="([^"]+)"', portrait.curve(rows))
    assert found
    across, up = portrait.WIDTH - portrait.LEFT - 8, portrait.HEIGHT - portrait.BELOW - 8
    expected = [(portrait.LEFT, 8 + up), (portrait.LEFT + across / 2, 8), (portrait.LEFT + across, 8 + up / 2)]
    assert [tuple(map(float, p.split(","))) for p in found[1].split()] == [pytest.approx(e, abs=0.06) for e in expected]
    assert ">75 %<" in portrait.curve(rows) and ">25 %<" in portrait.curve(rows)
    assert portrait.curve(rows[:2]) == ""


def test_names_are_no_markup(tmp_path: Path) -> None:
    result = run(tmp_path, name="<i>", stop_after=1)
    assert "&lt;i&gt;" in result._repr_html_() and "<i>" not in result._repr_html_() and "stopped" in result._repr_html_()


def test_a_result_that_is_none_yet_shows_why(tmp_path: Path) -> None:
    result = run(tmp_path)
    (result.path / "summary.json").unlink()
    assert repr(result) == f"Result('{result.path}': the run {result.path} has not ended)"
    assert "has not ended" in result._repr_html_()


def test_plot(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    result, axis = run(tmp_path, rounds=3), Figure().subplots()
    assert result.plot(ax=axis) is axis
    line = axis.lines[0]
    assert list(line.get_xdata()) == [1, 2, 3] and axis.get_ylabel() == "test accuracy (%)"
    assert list(line.get_ydata()) == pytest.approx([100 * row["accuracy"] for row in result.metrics])
    assert list(result.plot("loss", axis).lines[1].get_ydata()) == [row["loss"] for row in result.metrics]
    with pytest.raises(UserError, match="has no numbers under 'los'; did you mean 'loss'"):
        result.plot("los")


# -- labels ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Six digits as files; the last is of another size and in colour."""
    files = []
    for number, pixels in enumerate(few_digits().test.images[:6, 0].numpy()):
        image = Image.fromarray(pixels)
        files.append(tmp_path / "pictures" / f"{number}.png")
        files[-1].parent.mkdir(exist_ok=True)
        (image.convert("RGB").resize((11, 9)) if number == 5 else image).save(files[-1])
    return files


@pytest.mark.parametrize("image", [{}, {"size": 12}, {"size": 6, "fit": "resize"}, {"channels": 3}], ids=str)
def test_every_form_of_an_image_has_the_numbers_of_the_command(image: dict[str, Any], pictures: list[Path], tmp_path: Path) -> None:
    result = run(tmp_path, image=image)
    predict(result.path, pictures[0].parent, tmp_path / "out.csv", probabilities=True)
    rows = [line.split(",") for line in (tmp_path / "out.csv").read_text().splitlines()[1:]]
    labels, expected = [row[1] for row in rows], np.array([row[3:13] for row in rows], float)
    opened = [Image.open(f) for f in pictures]
    arrays = few_digits().test.images[:5]
    forms: dict[str, tuple[Any, int]] = {
        "a folder": (pictures[0].parent, 6), "paths": ([str(f) for f in pictures], 6), "pictures": (opened, 6),
        "arrays of several sizes": ([np.asarray(p) for p in opened], 6), "NCHW": (arrays, 5), "NHW": (arrays[:, 0].numpy(), 5),
        "NHWC": (arrays.movedim(1, -1).numpy(), 5), "real numbers": (arrays.float() / 255, 5), "a picture": (opened[0], 1),
        "a path": (pictures[0], 1), "HW": (arrays[0, 0], 1), "CHW": (arrays[0], 1), "colour": (arrays.expand(-1, 3, -1, -1), 5),
    }  # fmt: skip
    for name, (form, count) in forms.items():
        found = result.predict(form)
        assert found.labels == labels[:count], name
        assert np.abs(found.probabilities - expected[:count]).max() < 2e-6, name  # the CSV has six digits; batches of other sizes round otherwise
        assert found.classes == list(few_digits().classes)


def test_what_cannot_be_labelled(pictures: list[Path], tmp_path: Path) -> None:
    result = run(tmp_path)
    for images, said in (
        (3, "what is of the type int cannot be labelled"), ([pictures[0], None], "image 1 is a NoneType, which is no image"),
        (np.zeros((4, 8, 8), np.float32) - 1, "the images has pixels of type float32 outside 0 to 1"),
        (np.zeros((2, 8, 8, 4), np.uint8), r"the images have the shape \[2, 8, 8, 4\]"),
        ([np.zeros((2, 8, 8, 3), np.uint8)], r"image 0 is a ndarray of shape \[2, 8, 8, 3\]"), (tmp_path / "none.png", "there is no image .*none.png; give the path"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            result.predict(images)
    assert result.predict([]).labels == []


# -- data --------------------------------------------------------------------------------------------------------------
class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return self.images[at], int(self.labels[at])


def test_data_sets_and_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    """A Dataset, TensorDataset and arrays of the same images make the same run."""
    s = few_digits()
    forms = {
        "dataset": (Pairs(s.train.images, s.train.labels), Pairs(s.test.images, s.test.labels)),
        "tensors": (torch.utils.data.TensorDataset(s.train.images, s.train.labels), torch.utils.data.TensorDataset(s.test.images, s.test.labels)),
        "arrays": ((s.train.images[:, 0].numpy(), s.train.labels.numpy()), (s.test.images.movedim(1, -1).numpy(), s.test.labels.tolist())),
    }
    forms["arrays"] = (forms["arrays"][0], (forms["arrays"][1][0], np.array(forms["arrays"][1][1])))
    results = [run(tmp_path, data=data, test=test, classes=10, name=name) for name, (data, test) in forms.items()]
    assert [r.config.data for r in results] == ["dataset", "dataset", "arrays"]
    assert results[0].metrics[-1]["loss"] == results[1].metrics[-1]["loss"] == results[2].metrics[-1]["loss"]
    assert (results[0].path / "model.safetensors").read_bytes() == (results[2].path / "model.safetensors").read_bytes()


def test_a_run_on_a_data_set_is_resumed_with_it(tmp_path: Path) -> None:
    s = few_digits()
    data, test = Pairs(s.train.images, s.train.labels), Pairs(s.test.images, s.test.labels)
    whole = run(tmp_path, data=data, test=test, name="whole")
    part = run(tmp_path, data=data, test=test, stop_after=1)
    done = fallow.resume(part.path, source=data, test=test)
    assert (done.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


def test_classes_are_found_or_asked() -> None:
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4

    def classes(data: Any, asked: Any = None) -> tuple[str, ...]:
        source = given.source_of(data, data, asked)
        assert source
        return source.classes

    pairs = Pairs(torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.arange(40) % 4)
    assert classes((images, labels)) == ("0", "1", "2", "3")
    assert classes((images, labels), 6) == tuple("012345") and classes(pairs, list("abcd")) == tuple("abcd")
    pairs.classes = ["north", "east", "south", "west"]  # type: ignore[attr-defined]
    assert classes(pairs) == classes(torch.utils.data.Subset(pairs, range(8))) == ("north", "east", "south", "west")
    with pytest.raises(UserError, match="data has the label 3, out of range for 3 classes"):
        classes((images, labels), 3)


def test_a_test_set_is_held_out_where_none_is_given() -> None:
    images = np.arange(40, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    source = given.source_of((images, np.arange(40) % 4))
    assert source and len(source.train) == 32 and torch.bincount(source.test.labels).tolist() == [2, 2, 2, 2]
    both = torch.cat([source.train.images, source.test.images])[:, 0, 0, 0]
    assert sorted(both.tolist()) == list(range(40))


@pytest.mark.parametrize("data, said", [
    (torch.utils.data.DataLoader(Pairs(torch.zeros(2, 1, 8, 8), torch.zeros(2))), "data is a DataLoader.*give its Dataset, data=loader.dataset"),
    (7, "data is of the type int, which cannot be read as images; give a name such as cifar10, a torch Dataset"),
    ((np.zeros((4, 8, 8), np.uint8), np.zeros(3, int)), r"data has 4 images and labels of type int64 and shape \[3\]"),
    ((np.zeros((4, 8, 8), np.uint8), np.full(4, -1)), "data has no labelled image"),
    ("digits", "test is given, but data is no Dataset"),
], ids=["loader", "number", "labels", "unknown", "name"])  # fmt: skip
def test_data_that_cannot_be_taken(data: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(None, {}) and given.source_of(data, data if isinstance(data, str) else None)


def test_a_source_is_printed_shortly() -> None:
    source = sources.load("digits")
    expected = "Source('digits', 10 classes, train=ImageSet(1,500 images of 1x8x8), test=ImageSet(297 images of 1x8x8))"
    assert repr(source) == expected
    labels = source.train.labels.clone()
    labels[:500] = -1
    assert repr(type(source.train)(source.train.images, labels)) == "ImageSet(1,500 images of 1x8x8, 500 without label)"


# -- progress ----------------------------------------------------------------------------------------------------------
def test_nothing_is_printed_where_nobody_looks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    run(tmp_path, quiet=True)
    assert capfd.readouterr() == ("", "")
    run(tmp_path, quiet=False)
    out, err = capfd.readouterr()
    assert out == "" and "round 2/2  accuracy" in err
    with pytest.raises(UserError, match="progress is no key of a run; write quiet=True"):
        run(tmp_path, progress=False)


def test_a_watcher_of_ones_own_takes_the_place_of_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Speaker, "is_terminal", True)
    seen: list[str] = []
    run(tmp_path, watch=lambda event, what: seen.append(event))
    seen = [event for event in seen if event != "warning"]
    assert seen == ["start", "round", "round", "end"] and capfd.readouterr() == ("", "")
    run(tmp_path, watch=lambda event, what: seen.append(event), quiet=False)
    assert [event for event in seen[4:] if event != "warning"] == ["start", "round", "round", "end"] and "fedavg on few-digits: 4 clients" in capfd.readouterr().err


class Handle:
    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        self.update(bundle, raw)
        return self

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.shown.append(bundle)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """A notebook's IPython, as far as Fallow looks at it."""
    handle = Handle()
    module: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=handle.display))  # type: ignore[arg-type]
    return handle


def test_a_notebook_has_a_bar_of_its_own(tmp_path: Path, notebook: Handle, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onlookers, "PAUSE", 0)
    result = run(tmp_path, rounds=3, name="<run>")
    assert capfd.readouterr() == ("", "") and (count := len(notebook.shown)) >= 5
    first, last = notebook.shown[0], notebook.shown[-1]
    assert '<progress value="0" max="3"' in first["text/html"] and "&lt;run&gt;" in first["text/html"]
    assert '<progress value="3" max="3"' in last["text/html"]
    assert f"round 3/3  accuracy {100 * result.accuracy:5.2f} %" in last["text/plain"]
    run(tmp_path, quiet=True)
    assert len(notebook.shown) == count


def test_an_interrupted_cell_says_how_to_go_on(tmp_path: Path, notebook: Handle) -> None:
    def stop(event: str, what: Any) -> None:
        if event == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, watch=stop, quiet=False)
    assert notebook.shown[-1]["text/plain"].endswith(f"round 1/2  interrupted; go on with fallow.resume('{tmp_path / 'run'}')")


def test_a_terminals_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))  # type: ignore[arg-type]
    assert not onlookers.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert not onlookers.in_notebook()
