"""docs/own-method.md: its list of parts is complete, and the method in it runs."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
from conftest import HERE

from fallow.runs.trial import tried

PAGE = (HERE.parent / "docs" / "own-method.md").read_text()
PARTS = HERE.parent / "fallow" / "methods" / "parts"


@pytest.mark.parametrize("module", ["losses", "labelling", "batching", "averaging", "grouping", "dma"])
def test_every_part_is_listed_with_its_arguments(module: str) -> None:
    listed = PAGE[PAGE.index("## Losses and parts") : PAGE.index("## Five rules")]
    for node in ast.parse((PARTS / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert re.search(rf"`{node.name}[(`]", listed), f"{module}.{node.name} is not in docs/own-method.md"
            called = re.search(rf"`{node.name}\(([^`]*)\)`", listed)
            if called and isinstance(node, ast.FunctionDef):
                words = [w.partition("=")[0].strip() for w in called[1].split(",")]
                known = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)] + ["**columns"]
                assert set(words) <= set(known), f"{module}.{node.name} takes {known}, not {words}"
    gone = set(re.findall(r"`([a-z_]+)\(", listed)) - {
        n.name for file in PARTS.glob("*.py") for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)
    }
    assert not gone, f"there is no {gone}"


def test_the_method_that_builds_an_update_passes_its_checks(tmp_path: Path) -> None:
    start = PAGE.index("    from fallow import Method, Net, Value\n")
    code = textwrap.dedent(PAGE[start : PAGE.index("## Where things are")])
    (tmp_path / "sure.py").write_text(code)
    trial = tried(f"{tmp_path}/sure.py:Sure", {"labels": "some"})
    assert trial.sentences == []
