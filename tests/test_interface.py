"""What a method speaks with, as mypy sees it, and the engine's classes beside it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fallow.engine import feed, nets, party, server, slot
from fallow.methods import interface

ROOT = Path(__file__).parents[1]
RIGHT = '''
import torch
from torch import Tensor

from fallow.config import key
from fallow.methods.base import Batch, Found, Held, Method, Net, NetHandle, Party, Plan, Slot
from fallow.methods.parts.batching import paired
from fallow.methods.parts.losses import cross_entropy, kl


class Teaching(Slot):
    teacher: NetHandle


class Ramped(Batch):
    ramp: Tensor


class Mine(Method[Teaching, Party, Ramped]):
    class Options(Method.Options):
        decay: float = key(0.9, "how slowly the teacher follows")

    o: Options

    def holds(self) -> Held:
        return {"model": Net(), "teacher": Net(keep=True, train=False)}

    def begin(self, party: Party) -> dict[str, Tensor]:
        return {"z": party.predict(party.model, party.unlabelled, "weak")}

    def plan(self, party: Party, found: Found) -> Plan:
        x, u = paired(party, "labelled", ("weak", "strong"))
        return Plan(x=x, u=u, ramp=party.round / self.o.rounds)

    def step(self, s: Teaching, b: Ramped) -> None:
        zx, zs = s.model.together(b.x.labelled, b.u.strong)
        loss = cross_entropy(zx, b.x.y) if b.x else 0.0
        with torch.no_grad():
            target = s.teacher(b.u.weak, stats="batch").softmax(1)
        s.descend(loss + b.ramp * kl(target, zs).mean())
        s.teacher.follow(s.model, self.o.decay)
'''
WRONG = {  # what it says -> what was meant
    "s.descent(loss": "s.descend(loss",
    "s.techer(": "s.teacher(",
    "b.rampe *": "b.ramp *",
    "b.x.labeled": "b.x.labelled",
    "b.u.week": "b.u.weak",
    "self.o.deacy": "self.o.decay",
    "party.unlabeled": "party.unlabelled",
    'stats="batches"': 'stats="batch"',
    "s.model.togther": "s.model.together",
    "-> dict[str, int]": "-> dict[str, Tensor]",
}


def test_mypy_finds_each_wrong_name_and_nothing_else(tmp_path: Path) -> None:
    """One run, with all mistakes in one file; it uses what mypy knows of the package from `make lint`."""
    pytest.importorskip("mypy")
    text = RIGHT
    for mistake, meant in WRONG.items():
        assert meant in text
        text = text.replace(meant, mistake)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT).stdout
    assert "right.py" not in told, told
    for mistake in WRONG:
        lines = [f"wrong.py:{n}:" for n, line in enumerate(text.splitlines(), 1) if mistake in line]
        assert any(line in told for line in lines), f"{mistake} goes unnoticed:\n{told}"


@pytest.mark.parametrize(
    ("said", "made"),
    [(interface.Party, party.Party), (interface.Slot, slot.Slot), (interface.NetHandle, nets.NetHandle), (interface.Server, server.Server)],
)
def test_the_engine_has_what_the_interface_says(said: type, made: type) -> None:
    """Each method by its name, with the same parameters and defaults; what else is a property, or set when it is made."""
    source = inspect.getsource(made)
    for name, member in vars(said).items():
        if inspect.isfunction(member) and name in vars(made) and (name == "__call__" or name[0] != "_"):
            here, there = parameters(member), parameters(getattr(made, name))
            assert here == there[: len(here)], name
        elif name[0] != "_" or name in ("__getitem__", "__setitem__", "__contains__"):
            assert hasattr(made, name) or f"self.{name}" in source, name
    for name in said.__annotations__:
        assert hasattr(made, name) or f"self.{name}" in source or name == "model", name


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_a_part_of_a_batch_has_what_the_interface_says() -> None:
    for name in (*interface.BatchPart.__annotations__, "rows"):
        assert getattr(feed.Part(None), name) is None


def test_no_signature_of_the_methods_has_any() -> None:
    """Entries of messages and of the server are `Entry`, which says what they are."""
    for file in (ROOT / "fallow" / "methods").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
                notes = [a.annotation for a in arguments if a] + [node.returns]
                names = {n.id for note in notes if note for n in ast.walk(note) if isinstance(n, ast.Name)}
                assert "Any" not in names, f"{file.name}: {node.name}"


def test_comments_name_no_page_that_is_not_here() -> None:
    """A number like (11.2) is of no chapter in the repository; a paper's equations are "Eq. 3"."""
    number = re.compile(r"\((?:[2-9]|1[0-8])\.[0-9]+(?:\.[0-9]+)*(?:, [0-9.]+)*\)|\bchapter\b|methods\.md|\btrap T")
    for file in [*(ROOT / "fallow").rglob("*.py"), *(ROOT / "fallow" / "recipes").rglob("*.yaml")]:
        for line in file.read_text().splitlines():
            prose = line.partition("#")[2] if "#" in line else line if line.lstrip().startswith('"""') else ""
            assert not number.search(prose), f"{file}: {line}"
