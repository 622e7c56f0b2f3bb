"""The command line as it is typed: keys as flags, help, completion, version, one image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import TINY, few_digits
from PIL import Image

import fallow
from fallow.cli import app, completion, helping
from fallow.cli.flags import understood
from fallow.config import Config, Section
from fallow.data.views import view_names
from fallow.listing import VIEWS
from fallow.methods import REGISTERED, find

COMMAND: Any = typer.main.get_command(app)


@pytest.mark.parametrize("typed, meant", [
    ("run --rounds 3", "run rounds=3"), ("run --rounds=3", "run rounds=3"), ("--debug run --rounds 3", "--debug run rounds=3"),
    ("run demo --lr 1e-3 --name x", "run demo lr=1e-3 --name x"), ("run --name --rounds --rounds 3", "run --name --rounds rounds=3"),
    ("run --label-ratio 0.1 --quiet", "run label_ratio=0.1 --quiet"), ("run --augment.strong ra-usb", "run augment.strong=ra-usb"),
    ("run --seed -1", "run seed=-1"), ("run --threshold 0.5 -q", "run threshold=0.5 -q"),  # a key of some methods
    ("run --deterministic rounds=2", "run deterministic=true rounds=2"), ("run --data-dir D --clients 3", "run --data-dir D clients=3"),
    ("run --deterministic false", "run deterministic=false"), ("run --data-dir=D", "run --data-dir=D"),
    ("split --clients 3", "split clients=3"), ("predict --device cpu a b", "predict --device cpu a b"),
    ("", ""), ("--version", "--version"),
])  # fmt: skip
def test_keys_as_flags(typed: str, meant: str) -> None:
    assert understood(typed.split(), COMMAND) == meant.split()


def test_a_key_as_a_flag_is_a_key(fallow_cli: Any) -> None:
    words = [word for k, v in TINY.items() if k not in ("rounds", "label_count") for word in (f"--{k}", str(v))]
    told = fallow_cli("run", *words, "--rounds=1", "--label-count", "20", "--method", "fedavg", "--name", "x", "--quiet")
    assert told.code == 0 and fallow.load("runs/x").config.rounds == 1 and fallow.load("runs/x").config.label_count == 20
    assert fallow_cli("run", "--rounds").sentence == "--rounds has no value; write rounds=VALUE."
    assert "--nonsense" in fallow_cli("run", "--nonsense", "3").sentence


def test_version(fallow_cli: Any) -> None:
    told = fallow_cli("--version")
    assert (told.code, told.out) == (0, f"fallow {fallow.__version__}\n")


# -- help --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("words", [("run",), ("run", "method=semifl", "labels=server"), ("predict",), ("table",), ("resume",), ()], ids=" ".join)
def test_help_fits_the_terminal(columns: int, words: tuple[str, ...], fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    told = fallow_cli(*words, "--help")
    assert told.code == 0 and max(map(len, told.out.splitlines())) <= columns
    if not words:
        assert "..." not in re.sub(r"\]\.\.\.", "", told.out), "a command's first sentence is cut"


@pytest.mark.parametrize("name", sorted(COMMAND.commands))
def test_every_flag_is_explained(name: str) -> None:
    for option in COMMAND.commands[name].params:
        assert option.help or not option.opts[0].startswith("-"), option.opts


def test_help_has_the_methods_own_keys_first(fallow_cli: Any) -> None:
    told = fallow_cli("run", "method=semifl", "labels=server", "--help").out
    titles = [title for title in ("Its own", *helping.STARTS.values()) if f"\n\n{title}\n" in told]
    assert titles == ["Its own", *helping.STARTS.values()] and sorted(titles, key=lambda t: told.index(f"\n\n{t}\n")) == titles
    own = told[told.index("\nIts own\n") : told.index(f"\n{helping.STARTS['method']}\n")]
    assert "threshold" in own and "mixup" in own and "rounds" not in own.split()
    for flag in ("--data-dir", "--stop-after", "--quiet, -q", "--trust", "--help"):
        assert f"  {flag}" in told


def test_every_key_has_its_section() -> None:
    rows = [(name, "", "", "", "") for name in Config.model_fields]
    found = helping.sections(rows)
    assert sorted(r[0] for group in found.values() for r in group) == sorted(Config.model_fields)
    homes = {row[0]: title for title, group in found.items() for row in group}
    expected = {"seed": "Method and seeds", "norm": "Data and model", "clients": "Federation", "lr": "Training", "server_epochs": "Server",
                "server_lr": "Server", "dma_lr": "Parts: labelling, averaging", "slots": "Device", "measure": "Testing, checkpoints, measuring"}  # fmt: skip
    assert {name: homes[name] for name in expected} == expected


def test_every_view_is_described() -> None:
    assert list(VIEWS) == view_names()


# -- completion --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("typed, incomplete, offered", [
    ([], "roun", ["rounds=", "rounds=30"]), (["rounds=3"], "optimiz", ["optimizer=", "optimizer_state="]),
    ([], "optimizer=", ["optimizer=sgd", "optimizer=adam"]), (["optimizer", "="], "a", ["adam"]), (["optimizer"], "", ["sgd", "adam"]),
    ([], "method=fedd", ["method=feddb", "method=feddure"]), (["method=fedavg"], "augment.str", ["augment.strong=", *[f"augment.strong={v}" for v in VIEWS]]),
    ([], "feddb/table1", ["feddb/table1"]), (["rounds=3"], "feddb/", []), (["method=semifl"], "mixu", ["mixup="]), (["method=fedavg"], "mixu", []),
    ([], "partition=sk", ["partition=skew"]), (["a=1"], "model=wrn", ["model=wrn-28-2", "model=wrn-28-8"]), ([], "data=fol", ["data=folder:"]),
    ([], "no_such=", []), (["lr=1"], "clip_", ["clip_value="]),
])  # fmt: skip
def test_what_is_offered(typed: list[str], incomplete: str, offered: list[str]) -> None:
    assert completion.words(typed, incomplete) == offered


def test_every_key_is_offered() -> None:
    sections = {name for name, field in Config.model_fields.items() if isinstance(field.default, Section)}
    assert {key.partition(".")[0] for key in completion.common()} == set(Config.model_fields)
    assert not sections & set(completion.common())
    own = {key for name in REGISTERED for key in find(name).Options.model_fields} - set(Config.model_fields)
    assert own == set(completion._of_method([]))


def test_a_shell_is_answered_without_torch() -> None:
    """As bash asks; and the heavy imports are not there."""
    env = os.environ | {"COMP_WORDS": "fallow\nrun\nclie", "COMP_CWORD": "2", "_FALLOW_COMPLETE": "complete_bash"}
    code = "import atexit, sys; sys.argv = ['fallow']; atexit.register(lambda: print('torch' in sys.modules)); from fallow.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["clients=", "clients=10", "False"], done.stderr


# -- one image ---------------------------------------------------------------------------------------------------------
def test_one_image_is_labelled_on_the_spot(fallow_cli: Any) -> None:
    result = fallow.run(name="x", method="fedavg", **TINY)
    Image.fromarray(few_digits().test.images[0, 0].numpy()).save("seven.png")
    told = fallow_cli("predict", "runs/x", "seven.png")
    lines = [line.split() for line in told.out.splitlines()]
    found = result.predict("seven.png")
    assert told.code == 0 and lines[0] == ["label", "probability"] and lines[1][0] == found.labels[0]
    assert [line[1] for line in lines[1:]] == [f"{100 * p:.2f}" for p in sorted(found.probabilities[0], reverse=True)]
    assert not Path("predictions.csv").exists()
    Path("notes.txt").write_text("no image")
    assert fallow_cli("predict", "runs/x", "notes.txt").sentence == "notes.txt is no image by its name; give a PNG, JPEG or other image file."
    assert fallow_cli("predict", "runs/x", "no.png").sentence == "there is no image no.png; give the path of an image, or of a folder of images."
    assert fallow_cli("predict", "runs/x", "no").sentence == "there is no folder no; give the path of a folder of images."
