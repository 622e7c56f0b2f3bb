"""What people type who do not know the commands yet, and the sentence that takes them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fallow
from fallow import demo

SAID = {
    # a word in the place of a recipe
    "run fixmatch": "there is no recipe 'fixmatch'; it is a method: write method=fixmatch.",
    "run fixmach": "there is no recipe 'fixmach'; did you mean 'method=fixmatch'?",
    "run method fixmatch": "there is no recipe 'method'; it is a key: write method=VALUE.",
    "run method: fixmatch": "there is no recipe 'method:'; it is a key: write method=VALUE.",
    "run photos": "there is no recipe 'photos'; if these are your images, write data=photos.",
    "run digits": "there is no recipe 'digits'; write method=NAME, data=NAME, or one of `fallow list recipes`.",
    "run semifl/tabel1": "there is no recipe 'semifl/tabel1'; did you mean 'semifl/table1'?",
    "run semifl/": "there is no recipe 'semifl/'; did you mean 'semifl/base', 'semifl/table1' or 'semifl/table2'?",
    "run nowhere/photos": "there is no recipe 'nowhere/photos'; give the path of a .yaml file, data=PATH for your images, or one of",
    "run my|photos": "there is no recipe 'my photos'; if these are your images, write 'data=my photos'.",
    "run data=my photos": "'photos' is not key=value; write for example rounds=10, or quotes around a value with blanks: 'data=my photos'.",
    "run data=notes.txt": "notes.txt is a file of no kind that holds a data set; give a folder of images, a .csv or an .npz.",
    "run twice.yaml": "twice.yaml is not valid YAML in line 3 (a second key 'rounds'); ",
    "run nested.yaml": "nested.yaml is not valid YAML in line 3 (a second key 'flip'); ",
    "table table.yaml --dry-run": "digts few, A: there is no data set 'digts'; did you mean 'digits'?",
    # a word in the place of a command
    "runn": "there is no command 'runn'; did you mean `fallow run`?",
    "fixmatch": "there is no command 'fixmatch'; fixmatch is a method; write `fallow run method=fixmatch`.",
    "method=fixmatch": "there is no command 'method=fixmatch'; write `fallow run method=fixmatch`.",
    "semifl/table1": "there is no command 'semifl/table1'; write `fallow run semifl/table1`.",
    "nonsense": "there is no command 'nonsense'; `fallow --help` lists them.",
    "federation start": "there is no command 'start'; did you mean `fallow federation status`?",
    # something left out
    "predict": "RUN is missing; write fallow predict RUN IMAGES (`fallow predict --help` says more).",
    "predict runs/a": "IMAGES is missing; write fallow predict RUN IMAGES (",
    "compare": "RUN... is missing; write fallow compare RUN... (",
    "figure accuracy runs": "--out is missing; write fallow figure NAME RUN... --out ... (",
    "list": "methods|datasets|models|partitions|recipes|views|figures is missing; write fallow list methods|",
    "compare runs --rows": "Option '--rows' requires an argument; see `fallow --help`.",
    "predict found photos": "there is no run at found; give the folder of a run, such as found/one.",
    "export found": "there is no run at found; give the folder of a run, such as found/one.",
    # keys and flags
    "run --round 3": "there is no flag or key --round; did you mean '--rounds'?",
    "run --dryrun": "there is no flag or key --dryrun; did you mean '--dry-run'?",
    "run --xyzzy 3": "there is no flag or key --xyzzy; `fallow run --help` lists those there are.",
    "run partition=dirichlet": "the partition 'dirichlet' is not known; did you mean 'dirichlet-capped', 'dirichlet-client', 'dirichlet-equal'",
    "run method=fedavg,fixmach": "method=fixmach: there is no method 'fixmach'; did you mean 'fixmatch'?",
    "run method=fixmatch lr=0,1": "lr=0 is not allowed; give a number above 0 (lr means: local learning rate).",
}

FILES = {
    "notes.txt": "notes", "found/one/config.yaml": "version: 1", "twice.yaml": "rounds: 1\nlr: 0.1\nrounds: 2\n",
    "nested.yaml": "augment:\n  flip: never\n  flip: auto\n",
    "table.yaml": "rows: {A: {method: fedavg}}\ncells: {digts: {few: {label_count: 50}}}\n",
}  # fmt: skip


@pytest.mark.parametrize("words", SAID)
def test_sentences(words: str, fallow_cli: Any) -> None:
    for folder in ("photos", "my photos", "found/one"):
        Path(folder).mkdir(parents=True)
    for name, text in FILES.items():
        Path(name).write_text(text)
    told = fallow_cli(*[word.replace("|", " ") for word in words.split()])
    assert told.sentence.startswith(SAID[words]), told.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", ["help run", "run -h", "run --help"])
def test_ways_to_ask_for_help(words: str, fallow_cli: Any) -> None:
    told = fallow_cli(*words.split())
    assert told.code == 0 and told.out.startswith("usage: fallow run [RECIPE]")
    assert fallow_cli("help").out == fallow_cli("-h").out == fallow_cli().out


@pytest.mark.parametrize("group", ["inspect", "federation"])
def test_a_group_of_commands_lists_them(group: str, fallow_cli: Any) -> None:
    told = fallow_cli(group)
    assert told.code == 2 and "\\n" not in told.err
    assert "Commands:" in told.err.splitlines()


def test_the_demos_next_commands_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an activated environment the shell finds no `fallow`; the one beside Python is named then."""
    beside = tmp_path / ".venv/bin/fallow"
    beside.parent.mkdir(parents=True)
    beside.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(beside.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert demo.command() == ".venv/bin/fallow"
    monkeypatch.setenv("PATH", str(beside.parent))
    assert demo.command() == "fallow"


def test_classes_in_any_script(fallow_cli: Any, recwarn: pytest.WarningsRecorder) -> None:
    """matplotlib's font has not every letter; nobody is told so in its words."""
    for number, name in enumerate(("日本", "grüne Äpfel", "𓀀")):
        for k in range(6):
            place = Path("photos") / name / f"{k}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 40 * number + k).save(place)
    told = fallow_cli("check", "photos")
    assert told.code in (0, 1) and "日本" in told.out and not told.err
    assert fallow_cli("split", "data=photos", "clients=2", "label_count=6", "partition=iid").code == 0
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_one_image_that_cannot_be_read(fallow_cli: Any) -> None:
    done = fallow.run(method="fedavg", rounds=1, steps=1, clients=2, label_count=20, partition="iid")
    Path("empty.png").touch()
    assert fallow_cli("predict", str(done.path), "empty.png").sentence == "empty.png is empty; replace that file, or give another image."


# -- Python ------------------------------------------------------------------------------------------------------------
IMAGES, LABELS = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 3
PICTURE = Image.new("RGB", (8, 8))
GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"data": Path("nowhere")}, "there is no data set, folder or file 'nowhere'; "),
    ({"data": [(PICTURE, "cat")]}, "item 0 of data has the label cat; give a whole number from 0, the place of its class, or -1 where it is unknown."),
    ({"data": [(PICTURE, np.eye(3)[0])]}, "item 0 of data has the label of shape [3]; give a whole number from 0"),
    ({"data": [(PICTURE, 1, 0)]}, "item 0 of data is not an (image, label) pair; return (image, label) with "),
    ({"data": (IMAGES, 1 + LABELS)}, "the labels of data are 1 to 3; count classes from 0, or name them all with classes=[...]."),
    ({"data": (IMAGES, LABELS), "test": (IMAGES[:, :4, :4], LABELS)}, "data has images of 3x8x8 and test of 3x4x4; bring both to the same size"),
    ({"data": (IMAGES, LABELS), "test": (IMAGES[..., 0], LABELS)}, "data has images of 3x8x8 and test of 1x8x8; bring both to the same size"),
    ({"method": fallow.Method}, "method=<class 'fallow.methods.base.Method'> is no name; save it in a file and write method='FILE.py:Method'."),
    ({"method": ["fedavg", "uda"]}, "method=fedavg,uda are several values, and fallow.run makes one run; call it for each, or type `fallow run method=fedavg,uda`."),
    ({"seed": range(3)}, "seed=range(0, 3) is not allowed; give a whole number ("),
    ({"seed": (0, 1)}, "seed=0,1 are several values, and "),
    ({"seed": "0,1"}, "seed=0,1 are several values, and "),
    ({"watch": 5}, "watch=5 is no function; give one that takes (event, what), or leave it out."),
]


@pytest.mark.parametrize("keys, said", GIVEN, ids=[f"{'-'.join(keys)}-{n}" for n, (keys, _) in enumerate(GIVEN)])
def test_what_python_is_given(keys: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fallow.UserError) as error:
        fallow.run(**keys)
    assert str(error.value).startswith(said), error.value
    assert not Path("runs").exists()


def test_a_column_that_is_no_name(tmp_path: Path) -> None:
    done = fallow.run(out=tmp_path, method="fedavg", rounds=1, steps=1, clients=2, label_count=20, partition="iid")
    with pytest.raises(fallow.UserError, match=r"has no numbers under \['accuracy'\]; "):
        done.plot(["accuracy"])  # type: ignore[arg-type]
