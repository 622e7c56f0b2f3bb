"""docs/design.md is kept true: which room may import which, over the imports that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/design.md").read_text()
FRONT = {"board", "demo", "listing", "progress", ""}
SHORTCUTS = {  # imports upwards, inside a function: (who, whom)
    ("runs.result", "export"), ("runs.onlookers", "progress"), ("flower.running", "progress"), ("__main__", "cli"), ("targets", "data"),
}  # fmt: skip


def modules() -> dict[str, ast.Module]:
    """By name below the package."""
    found = {}
    for path in (ROOT / "fallow").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "fallow").with_suffix("").parts)
        found[name.removesuffix("__init__").removesuffix(".")] = ast.parse(path.read_text())
    return found


MODULES = modules()


def room(module: str) -> str:
    first = module.partition(".")[0]
    return "cli" if first in FRONT else first if first != "keys" and (ROOT / "fallow" / first).is_dir() else "base"


def imports(tree: ast.AST, deep: bool) -> Iterator[str]:
    """Modules of the package that are imported; `deep`: inside functions, too, and for the checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fallow":
            for alias in (a for a in node.names if a.name != "__version__"):
                inner = f"{node.module}.{alias.name}".removeprefix("fallow.")
                yield inner if inner in MODULES else (node.module or "").removeprefix("fallow").removeprefix(".")
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("fallow").removeprefix(".") for a in node.names if a.name.partition(".")[0] == "fallow")
        elif deep or (not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _for_checker(node)):
            yield from imports(node, deep)


def _for_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def allowed() -> dict[str, set[str]]:
    """The page's table; a room may always import itself."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*)\|$", PAGE, re.MULTILINE)
    rooms = {name for name, _ in rows}
    return {name: {name} | (rooms if "all" in may else set(re.findall(r"`(\w+)`", may))) for name, may in rows}


def test_the_table_names_every_room() -> None:
    assert set(allowed()) == {room(m) for m in MODULES}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    may = allowed()[room(module)]
    for other in imports(MODULES[module], deep=True):
        shortcut = any(module == a and (other == b or other.startswith(f"{b}.")) for a, b in SHORTCUTS)
        assert room(other) in may or shortcut, f"{module} imports {other}"
    for other in imports(MODULES[module], deep=False):
        assert room(other) in may, f"{module} imports {other} where it is loaded, and not in a function"


def test_every_shortcut_is_there_and_told() -> None:
    for who, whom in SHORTCUTS:
        assert any(o == whom or o.startswith(f"{whom}.") for o in imports(MODULES[who], deep=True)), (who, whom)
        assert f"`{who}` → `{whom}`" in PAGE


def test_no_module_waits_for_itself() -> None:
    """Nothing is imported in a circle where modules are loaded."""
    graph = {name: set(imports(tree, deep=False)) - {name} for name, tree in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_page_names_files_that_are_there() -> None:
    for path in re.findall(r"`(?:fallow/)?([\w/]+\.py)(?::\w+)?`", PAGE):
        places = [ROOT / "fallow" / path, ROOT / "fallow/engine" / path, ROOT / "fallow/data" / path, ROOT / path]
        assert any(p.exists() for p in places), path
