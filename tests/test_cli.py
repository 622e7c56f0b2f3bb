"""What the commands print: run, list, split, compare, help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

import fallow
from fallow.data.federate import Federation
from fallow.methods import REGISTERED, find

WORDS = [f"{k}={v}" for k, v in (TINY | {"method": "fixmatch"}).items()]


def test_run(fallow_cli: Any) -> None:
    told = fallow_cli("run", *WORDS)
    lines = told.out.splitlines()
    assert told.code == 0 and not told.err
    assert lines[0].startswith("fixmatch on few-digits: 4 clients (2 a round), 40 labelled and 200 unlabelled images, small-cnn on cpu; run runs/")
    assert lines[1].startswith("2 rounds of 2 steps of 8 + match-steps images, lr 0.03 (constant)")
    assert lines[2].startswith("round 1/2  accuracy ") and lines[3].startswith("round 2/2  accuracy ")
    path = Path(lines[-1].removeprefix("run: "))
    assert path == Path("runs/fixmatch-few-digits-seed0")
    assert {p.name for p in path.iterdir()} >= {"config.yaml", "federation.npz", "metrics.jsonl", "checkpoint", "model.safetensors", "summary.json"}
    summary = json.loads((path / "summary.json").read_text())
    for key in ("last", "best", "best_round", "mean_last_10", "rounds", "seconds", "seconds_per_round", "seed", "method", "data",
                "fingerprint", "config_hash", "device", "versions", "commit", "status"):  # fmt: skip
        assert key in summary, key
    row = json.loads((path / "metrics.jsonl").read_text().splitlines()[0])
    for key in ("round", "accuracy", "test_loss", "loss", "label_ratio", "label_accuracy", "label_accuracy_all", "bytes_up", "bytes_down", "lr", "seconds"):
        assert key in row, key
    assert f"accuracy {100 * summary['last']:.2f} % after round 2 (best {100 * summary['best']:.2f} % in round {summary['best_round']})" in told.out


def test_run_quietly_and_from_a_recipe(fallow_cli: Any) -> None:
    Path("mine.yaml").write_text("about: mine\n" + "".join(f"{w.replace('=', ': ')}\n" for w in WORDS))
    told = fallow_cli("run", "mine.yaml", "rounds=1", "seed=3", "--quiet", "--out", "here", "--name", "x")
    assert told.code == 0 and len(told.out.splitlines()) == 2 and told.out.endswith("run: here/x\n")
    result = fallow.load("here/x")
    assert (result.config.rounds, result.config.seed, result.summary["seed"]) == (1, 3, 3)
    assert result.accuracy == result.metrics[-1]["accuracy"]
    assert sum(p.numel() for p in result.model().parameters()) == 94186


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions", "recipes", "views", "figures"])
def test_lists(what: str, fallow_cli: Any) -> None:
    told = fallow_cli("list", what, "--no-time")
    wanted = {"methods": list(REGISTERED), "datasets": ["digits", "cifar10", "folder:PATH"], "models": ["small-cnn", "wrn-28-2"],
              "partitions": ["iid", "shards"], "recipes": ["default"], "views": ["weak", "ra-mc"], "figures": ["accuracy", "partition"]}[what]  # fmt: skip
    firsts = [line.split()[0] for line in told.out.splitlines()[1:] if line.strip()]
    assert told.code == 0 and set(wanted) <= set(firsts)


def test_list_of_methods_says_what_each_is(fallow_cli: Any) -> None:
    told = fallow_cli("list", "methods").out
    for name in REGISTERED:
        assert find(name).paper in told


@pytest.mark.parametrize("name", REGISTERED)
def test_help_lists_a_methods_keys(name: str, fallow_cli: Any) -> None:
    told = fallow_cli("run", f"method={name}", "--help", *(["labels=server"] if find(name).scenarios == {"server"} else []))
    assert told.code == 0 and f"Keys of method {name}" in told.out
    shown = {line.split()[0] for line in told.out.splitlines() if line.strip()}
    fields = find(name).Options.model_fields
    assert set(fields) - {"image", "augment"} <= shown and {"image.size", "augment.strong"} <= shown


def test_help(fallow_cli: Any) -> None:
    for words in ((), ("--help",)):
        told = fallow_cli(*words)
        assert told.code == 0 and "Federated semi-supervised learning" in told.out and "resume" in told.out
    assert fallow_cli("resume", "--help").code == 0


def test_split(fallow_cli: Any) -> None:
    told = fallow_cli("split", *WORDS, "partition=shards:5", "--picture", "p.svg", "--save", "f.npz")
    assert told.code == 0
    lines = told.out.splitlines()
    assert lines[0].split()[:3] == ["client", "labelled", "unlabelled"]
    counts = [[int(c) for c in line.split()[:3]] for line in lines[1:5]]
    assert [c[0] for c in counts] == [0, 1, 2, 3] and sum(c[1] for c in counts) == 40
    federation = Federation.load("f.npz")
    assert f"fingerprint: {federation.fingerprint}" in told.out and "labelled total: 40" in told.out
    assert [len(c.unlabelled) for c in federation.clients] == [c[2] for c in counts]
    assert Path("p.svg").read_text().startswith("<?xml")
    again = fallow_cli("split", *WORDS, "partition=shards:5", "--picture", "p.svg")
    assert federation.fingerprint in again.out  # and the run of these settings has the same
    assert fallow_cli("run", *WORDS, "partition=shards:5", "rounds=1", "--name", "x").code == 0
    assert fallow.load("runs/x").summary["fingerprint"] == federation.fingerprint
    assert not list(Path("runs").glob("split*"))


def test_a_splits_picture_has_the_splits_seed(fallow_cli: Any) -> None:
    assert fallow_cli("split", *WORDS, "partition=iid").out.splitlines()[-1] == "picture: split-iid-seed0.png"
    assert fallow_cli("split", *WORDS, "partition=iid", "split_seed=3").out.splitlines()[-1] == "picture: split-iid-seed3.png"


def test_split_to_a_place_that_is_not_there(fallow_cli: Any) -> None:
    told = fallow_cli("split", *WORDS, "--picture", "no/p.png")
    assert told.sentence == "no/p.png cannot be written (No such file or directory); make its folder first, or choose another with --picture."
    told = fallow_cli("split", *WORDS, "--picture", "p.png", "--save", "no/f.npz")
    assert told.sentence == "no/f.npz cannot be written (No such file or directory); make its folder first, or choose another with --save."
    assert fallow_cli("split", *WORDS, "--picture", "p.txt").sentence == "a picture cannot be written as 'p.txt'; end the name in .png or .svg."


def test_compare(fallow_cli: Any) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        assert fallow_cli("run", *WORDS, f"seed={seed}", "--name", name, "--quiet").code == 0
    told = fallow_cli("compare", "runs/a", "b")
    (title, one, other), table = (part.splitlines() for part in told.out.split("\n\n"))
    assert title.split()[:6] == ["run", "method", "data", "labels", "seed", "rounds"]
    best = fallow.load("runs/a").summary["best"]
    assert one.split()[:6] == ["runs/a", "fixmatch", "few-digits", "clients", "0", "2"] and f"{100 * best:.2f}" in one
    assert other.split()[0] == "runs/b" and other.split()[4] == "1"
    assert table[0].endswith("over 2 seeds") and table[2].startswith("FixMatch  ")
    assert len(fallow_cli("compare", "runs/a").out.splitlines()) == 2  # one run is no table


def test_importing_fallow_is_light() -> None:
    code = "import fallow, sys; print([m for m in ('torch', 'pydantic', 'typer', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fallow.nothing  # noqa: B018


@pytest.mark.parametrize("own", [None, "4"])
def test_importing_fallow_asks_for_queues_to_a_gpu(own: str | None) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    env = {k: v for k, v in os.environ.items() if k != name} | ({name: own} if own else {})
    code = f"import fallow, os; print(os.environ[{name!r}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout.strip() == (own or "32")


def test_the_bar_counts_clients(tmp_path: Path) -> None:
    """A round may take minutes; the bar says how many of its clients have ended."""
    import io

    import fallow
    from fallow.progress import Bar
    from fallow.said import Speaker

    text = io.StringIO()
    with Bar(Speaker(file=text, force_terminal=True, width=120)) as bar:

        def watch(event: str, what: Any) -> None:
            bar(event, what)
            bar._bar.refresh()

        fallow.run(out=tmp_path, rounds=2, clients=4, active=3, watch=watch)
    assert "3/3 clients" in text.getvalue()
