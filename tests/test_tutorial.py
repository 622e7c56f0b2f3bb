"""The tutorial: every command of docs/tutorial.md is run, in order, in an empty folder."""

from __future__ import annotations

import csv
import glob
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE

ROOT = HERE.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INSTALL = "git clone … fallow && cd fallow\nmake setup\nsource .venv/bin/activate\n"  # what .ci/run does on a clean clone


def words_of(line: str) -> list[str]:
    """A line as a shell would split it, patterns filled in."""
    out = []
    for word in shlex.split(line):
        out += sorted(glob.glob(word)) if "*" in word else [word]
    return out


def titles(table: str) -> list[str]:
    return table.splitlines()[0].split()


@pytest.mark.xdist_group("graphs")
def test_every_command(fallow_cli: Any, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    assert blocks[0] == ("bash", INSTALL) and "\nsetup:" in (ROOT / "Makefile").read_text()
    printed, commands = "", []
    for kind, text in blocks[1:]:
        if kind == "python":
            exec(text, {})
        elif kind == "yaml":
            Path(text.split()[1]).write_text(text)
        elif kind == "bash":
            for line in text.splitlines():
                first, *words = words_of(line)
                assert first == "fallow", line
                told = fallow_cli(*words)
                assert told.code == 0, (line, told.err)
                printed, commands = told.out, [*commands, words[0]]
        else:
            assert kind == "text"
            if text.startswith("run "):  # what the command before it prints first, times and figures aside
                printed = printed.partition("\n\n")[0]
                assert titles(text) == titles(printed)
                assert [line.split()[:5] for line in text.splitlines()] == [line.split()[:5] for line in printed.splitlines()]
    assert commands == ["split", "run", "run", "run", "compare", "report", "figure", "figure", "export", "predict"]
    assert len(list(Path("photos/unlabelled").iterdir())) == 1400 and Path("who.png").stat().st_size > 1000
    with open("labels.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 1400 and {r["label"] for r in rows} <= set("0123456789")
    assert {"README.md", "model.safetensors", "model.pt2"} <= {p.name for p in Path("digits-model").iterdir()}
    for file in ("report.html", "accuracy.svg", "labels.png"):
        assert Path(file).stat().st_size > 1000
