"""Figures show the numbers of the runs, as text that stays text, also of results without weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from PIL import Image

from fallow.config import dump
from fallow.data import sources
from fallow.errors import UserError
from fallow.report import series
from fallow.report.figures import FIGURES, Request, described, figure
from fallow.runs import make_federation
from fallow.runs.settings import resolve

ACCURACY = {0: (0.2, 0.4, 0.6), 1: (0.4, 0.6, 0.6), 2: (0.6, 0.8, 0.6)}  # by seed, rounds 1 to 3


def result(path: Path, seed: int = 0, rounds: int = 3, **keys: Any) -> Path:
    """A thinned result: settings, metrics, summary."""
    _, options = resolve({}, {"data": "digits", "label_count": 100, "clients": 5, "seed": seed, "partition": "shards:4"} | keys)
    rows = []
    for n in range(1, rounds + 1):
        row = {"round": n, "accuracy": ACCURACY[seed][n - 1], "label_ratio": None, "label_accuracy": None}
        if options.method != "fedavg":
            row |= {"label_ratio": n / 10, "label_accuracy": 0.5 + n / 10, "label_accuracy_local": 0.5, "label_accuracy_global": 0.6}
            if n > 1:  # every second round
                row |= {"class_accuracy": [(i + seed) / 20 for i in range(10)], "prior_js": {"bias": 0.2, "labels": 0.1, "appu": 0.05 / n}}
                row |= {"prior_js_min": {"labels": 0.05, "appu": 0.0}, "prior_js_max": {"labels": 0.15, "appu": 0.1}}
                row |= {"diversity": {"gradient/users/l2": 3.0, "update/users/l2-squared": 2.0 * n}}
        rows.append(row)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump(options))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (path / "summary.json").write_text(json.dumps({"class_names": [f"digit {i}" for i in range(10)], "status": "finished"}))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """FixMatch with three seeds, then FedAvg with one."""
    return [*(result(tmp_path / f"fix-{s}", s, method="fixmatch") for s in range(3)), result(tmp_path / "avg", method="fedavg")]


def drawn(name: str, paths: list[Path], **request: Any) -> tuple[Figure, str]:
    canvas = Figure(layout="constrained")
    caption = FIGURES[name](canvas, Request(series.groups(paths), 3.5, request.get("parts", [])))
    return canvas, caption


def test_seeds_together_mean_and_deviation(runs: list[Path]) -> None:
    groups = series.groups(runs)
    assert [(g.label, len(g.runs)) for g in groups] == [("FixMatch", 3), ("FedAvg", 1)]
    curve = series.curve(groups[0], "accuracy")
    assert curve.rounds.tolist() == [1, 2, 3] and curve.count == 3
    assert curve.mean == pytest.approx([0.4, 0.6, 0.6])
    assert curve.std == pytest.approx([np.sqrt(0.08 / 3), np.sqrt(0.08 / 3), 0])  # deviations -.2, 0, .2
    assert series.curve(groups[0], "prior_js", "appu").rounds.tolist() == [2, 3]
    assert series.parts(groups[:1], "prior_js") == ["bias", "labels", "appu"]


def test_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    """A run cut off, or thinned metrics with other rounds: the mean is over all seeds wherever it is drawn."""
    paths = [result(tmp_path / "a", 0), result(tmp_path / "b", 1, rounds=2)]
    curve = series.curve(series.groups(paths)[0], "accuracy")
    assert curve.rounds.tolist() == [1, 2] and curve.mean == pytest.approx([0.3, 0.5])


def test_groups_are_named_by_what_differs(tmp_path: Path, runs: list[Path]) -> None:
    more = [result(tmp_path / "x", method="fixmatch", threshold=0.5), result(tmp_path / "y", method="fixmatch", threshold=0.5, lr=0.2)]
    assert [g.label for g in series.groups([runs[0], *more])] == [
        "FixMatch lr=0.03 threshold=0.95", "FixMatch lr=0.03 threshold=0.5", "FixMatch lr=0.2 threshold=0.5"
    ]
    assert [g.label for g in series.groups([runs[0], more[0], runs[3]])] == ["FixMatch threshold=0.95", "FixMatch threshold=0.5", "FedAvg"]
    other = result(tmp_path / "z", method="fixmatch", checkpoint_every=7, slots=3)  # not what a run is
    assert len(series.groups([runs[0], other])) == 1
    assert [g.label for g in series.groups(runs, ["ours", "theirs"])] == ["ours", "theirs"]
    with pytest.raises(UserError, match="1 names for 2 groups of runs; name each of: FixMatch; FedAvg"):
        series.groups(runs, ["ours"])


def test_a_run_of_an_older_version_is_one_of_the_seeds(tmp_path: Path, runs: list[Path]) -> None:
    """Keys it did not have yet count as their defaults, also inside a section; a changed one still tells runs apart."""
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    del config["split_seed"], config["labeller_decay"], config["augment"]["flip"]
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert [(g.label, len(g.runs)) for g in series.groups(runs)] == [("FixMatch", 3), ("FedAvg", 1)]
    other = result(tmp_path / "x", method="fixmatch", split_seed=7)
    assert [g.label for g in series.groups([runs[1], other])] == ["FixMatch split_seed=none", "FixMatch split_seed=7"]


def test_accuracy(runs: list[Path]) -> None:
    canvas, caption = drawn("accuracy", runs)
    axis = canvas.axes[0]
    assert caption == "Test accuracy over rounds; mean and standard deviation over 1 or 3 seeds."
    assert axis.lines[0].get_ydata() == pytest.approx([40, 60, 60]) and axis.lines[1].get_ydata() == pytest.approx([20, 40, 60])
    assert len(axis.collections) == 1  # a band where there are several seeds
    band = axis.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(60 + 100 * np.sqrt(0.08 / 3))
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["FixMatch", "FedAvg"]
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.lines}) == 2


def test_no_band_leaves_what_a_share_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and deviation are 97 and 5 %, 67 and 47 %, 0.7 and 0.9 %."""
    monkeypatch.setitem(ACCURACY, 0, (0.9, 0.0, 0.0))
    monkeypatch.setitem(ACCURACY, 1, (1.0, 1.0, 0.02))
    monkeypatch.setitem(ACCURACY, 2, (1.0, 1.0, 0.0))
    canvas, _ = drawn("accuracy", [result(tmp_path / f"s{s}", s, method="fedavg") for s in range(3)])
    band = canvas.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == 0 and band.max() == 100


def test_labels_and_labellers(runs: list[Path]) -> None:
    canvas, _ = drawn("labels", runs[:3])
    above, below = canvas.axes
    assert above.lines[0].get_ydata() == pytest.approx([10, 20, 30]) and below.lines[0].get_ydata() == pytest.approx([60, 70, 80])
    for path in runs[:3]:  # nobody knows the true labels of these images
        rows = [json.loads(line) | {"label_accuracy": None} for line in (path / "metrics.jsonl").read_text().splitlines()]
        (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    canvas, caption = drawn("labels", runs[:3])
    assert len(canvas.axes) == 1 and caption.startswith("Unlabelled images that got a pseudo-label;")
    canvas, _ = drawn("labellers", runs[:1])
    assert [line.get_ydata()[0] for line in canvas.axes[0].lines] == pytest.approx([60, 50])
    with pytest.raises(UserError, match="avg has no label_ratio in its metrics; leave it out: its method gives no pseudo-labels"):
        drawn("labels", runs)


def test_bias_and_diversity(tmp_path: Path, runs: list[Path]) -> None:
    canvas, caption = drawn("bias", runs[:3])
    assert [line.get_label() for line in canvas.axes[0].lines] == ["labelled classes", "APP-U"]
    assert canvas.axes[0].lines[1].get_ydata() == pytest.approx([0.025, 0.05 / 3])
    assert caption.endswith("labelled classes; APP-U; mean and standard deviation over 3 seeds.")
    canvas, caption = drawn("bias", runs[:1])  # of one run, the clients' spread
    band = canvas.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert canvas.axes[0].get_ylim()[1] >= 0.15 and (band.min(), band.max()) == pytest.approx((0.05, 0.15)) and "least and largest over a round's clients" in caption
    canvas, _ = drawn("diversity", runs[:1])
    assert canvas.axes[0].lines[0].get_ydata() == pytest.approx([4, 6])  # update/users/l2-squared unless asked otherwise
    canvas, _ = drawn("diversity", runs[:1], parts=["gradient/users/l2"])
    assert canvas.axes[0].lines[0].get_ydata() == pytest.approx([3, 3])
    with pytest.raises(UserError, match=r"diversity has no part 'gradient/users/l3' in all of these runs; did you mean 'gradient/users/l2'\?"):
        drawn("diversity", runs[:1], parts=["gradient/users/l3"])
    with pytest.raises(UserError, match="avg has no diversity in its metrics; run it with measure=diversity, or leave it out"):
        drawn("diversity", runs[3:])


def test_classes(runs: list[Path]) -> None:
    canvas, caption = drawn("classes", runs[:3])
    axis = canvas.axes[0]
    assert axis.lines[0].get_ydata() == pytest.approx([5 * (i + 1) for i in range(10)])  # seeds 0, 1, 2 are i, i+1, i+2 twentieths
    assert [t.get_text() for t in axis.get_xticklabels()] == [f"digit {i}" for i in range(10)]
    assert caption.startswith("Test accuracy by class, last round; mean")
    (runs[0] / "summary.json").unlink()  # a run that goes on
    text = (runs[0] / "metrics.jsonl").read_text()
    (runs[0] / "metrics.jsonl").write_text(text.replace("[0.0, 0.05,", "[0.0, null,"))  # no test image of class 1
    assert np.isnan(drawn("classes", runs[:1])[0].axes[0].lines[0].get_ydata()).tolist() == [False, True] + 8 * [False]
    assert drawn("classes", runs[:1])[0].axes[0].get_xticklabels()[3].get_text() == "3"


def test_partition_is_the_federation(runs: list[Path]) -> None:
    """Made again from the settings where the file is not there; areas are as the counts."""
    canvas, caption = drawn("partition", runs[:1])
    _, options = resolve({}, {"data": "digits", "label_count": 100, "clients": 5, "partition": "shards:4", "method": "fixmatch"})
    source = sources.load("digits")
    federation = make_federation(options, source)
    for axis, (side, counts) in zip(canvas.axes, federation.counts(source.train.labels.numpy(), 10).items(), strict=True):
        discs = axis.collections[0]
        clients, classes = discs.get_offsets().T.astype(int)
        widths = discs.get_widths()
        assert {(c, k) for c, k in zip(clients, classes)} == set(zip(*np.nonzero(counts)))
        assert widths**2 / (widths**2).max() == pytest.approx(counts[clients, classes] / counts.max())
        assert axis.get_title(loc="left") == f"{side}, largest {counts.max()}"
    assert "labelled 100 (R = " in caption and "unlabelled 1,400 (R = " in caption
    with pytest.raises(UserError, match="the figure partition is of one run"):
        drawn("partition", runs[:2])


def test_partition_of_a_whole_run_needs_no_data(runs: list[Path]) -> None:
    _, options = resolve({}, {"data": "digits", "label_count": 100, "clients": 5, "partition": "shards:4", "method": "fixmatch"})
    source = sources.load("digits")
    labels = source.train.labels.numpy().copy()
    made = make_federation(options, source)
    labels[made.clients[0].unlabelled] = -1  # nobody knows what client 0 holds
    made.save(runs[0] / "federation.npz", labels, source.classes)
    config = runs[0] / "config.yaml"
    config.write_text(config.read_text().replace("data: digits", "data: cifar10"))
    canvas, _ = drawn("partition", runs[:1])
    assert [t.get_text() for t in canvas.axes[1].get_yticklabels()][-1] == "unknown"
    offsets = canvas.axes[1].collections[0].get_offsets().astype(int)
    assert {tuple(o) for o in offsets if o[0] == 0} == {(0, 10)}


def test_partition_names_the_sites(runs: list[Path]) -> None:
    _, options = resolve({}, {"data": "digits", "label_count": 100, "clients": 5, "partition": "shards:4", "method": "fixmatch"})
    source = sources.load("digits")
    made = make_federation(options, source)
    replace(made, names=("north", "south", "a hospital with a long name", "east", "west")).save(runs[0] / "federation.npz", source.train.labels.numpy(), source.classes)
    axes = drawn("partition", runs[:1])[0].axes
    assert [t.get_text() for t in axes[-1].get_xticklabels()] == ["north", "south", "a hospital with…", "east", "west"]
    assert axes[-1].get_xlabel() == "" and list(axes[-1].get_xticks()) == [0, 1, 2, 3, 4]


def test_partition_without_the_data(tmp_path: Path) -> None:
    path = result(tmp_path / "x", data="cifar10", data_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"the classes of .*x cannot be drawn without its data: cifar10 is not in"):
        drawn("partition", [path])


@pytest.mark.parametrize("name", FIGURES)
def test_files(name: str, runs: list[Path], fallow_cli: Any) -> None:
    words = [str(p) for p in (runs[:1] if name == "partition" else runs[:3])]
    for ending in ("png", "svg"):
        told = fallow_cli("figure", name, *words, "-o", f"f.{ending}")
        assert told.code == 0 and told.out.splitlines()[-1] == f"figure: f.{ending}" and told.out.splitlines()[0].endswith(".")
    assert Image.open("f.png").width == 1050  # 3.5 inches at 300 dots
    text = Path("f.svg").read_text()
    assert re.search(r"<text[^>]*>(Round|Client|Class)</text>", text) and 'width="252pt"' in text
    first = Path("f.svg").read_bytes()
    fallow_cli("figure", name, *words, "-o", "f.svg")
    assert Path("f.svg").read_bytes() == first


def test_command(runs: list[Path], fallow_cli: Any) -> None:
    words = [str(p) for p in runs]
    assert fallow_cli("figure", "accuracy", *words, str(runs[0].parent / "nothing"), "-o", "f.png").code == 2
    (runs[0].parent / "other").mkdir()
    assert fallow_cli("figure", "accuracy", *words, str(runs[0].parent / "other"), "-o", "f.pdf", "--names", "a very long name of a method, b", "--width", "7").code == 0
    assert Path("f.pdf").read_bytes().startswith(b"%PDF")
    assert fallow_cli("figure", "acuracy", *words, "-o", "f.png").sentence == "there is no figure 'acuracy'; did you mean 'accuracy'?"
    assert fallow_cli("figure", "accuracy", *words, "-o", "f.gif").sentence == "a figure cannot be written as 'f.gif'; end the name in .png, .svg or .pdf."
    assert fallow_cli("figure", "accuracy", *words, "-o", "no/f.png").sentence.startswith("no/f.png cannot be written")
    assert "--width 100 is no width" in fallow_cli("figure", "accuracy", *words, "-o", "f.png", "--width", "100").sentence
    assert fallow_cli("figure", "accuracy", *words).sentence.startswith("--out is missing; write fallow figure NAME RUN... --out ")


def test_each_figure_is_described() -> None:
    assert {name for name, _ in described()} == set(FIGURES)
    page = (Path(__file__).parents[1] / "docs" / "figures.md").read_text()
    for name, what in described():
        assert f"| `{name}` | {what}" in page
    assert figure.__doc__


def test_a_column_without_values_is_not_taken_for_a_missing_one() -> None:
    made = SimpleNamespace(path="run", rows=[{"diversity": {"gradient/users/l2": None}}])
    assert str(series.lacking(made, "diversity")) == "the run run has no value of diversity that could be drawn; choose others with --parts, or leave it out."
    made.rows = [{}]
    assert str(series.lacking(made, "diversity")).endswith("run it with measure=diversity, or leave it out.")
