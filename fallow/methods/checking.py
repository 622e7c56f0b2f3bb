"""Mistakes in a method of one's own that can be seen without running it: a mistyped hook, a hook that takes something else."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from fallow.errors import UserError
from fallow.methods.base import Method
from fallow.own import Code

HOOKS = {
    "holds": (), "start": ("server",), "down": ("server", "client"), "begin": ("party",), "plan": ("party", "found"),
    "step": ("s", "b"), "end": ("party",), "merge": ("server", "updates"), "scenario_defaults": ("labels",),
}  # fmt: skip


def check(kind: type[Method], code: Code) -> None:
    """Ends with a sentence where a method's class has a hook that nobody would call, or that cannot be called."""
    for owner in kind.__mro__:
        if owner is not Method and issubclass(owner, Method) and not owner.__module__.startswith("fallow."):
            _check_names(owner, code)
            _check_arguments(owner, code)
            _check_step(kind, owner, code)


def _check_names(owner: type[Method], code: Code) -> None:
    if "refuse" in vars(owner):
        remedy = "write `def refuse(self)` in its Options, and raise a UserError(cause, remedy) there"
        raise UserError(f"{place(owner, 'refuse', code)} defines refuse for the method", remedy)
    _check_slips(owner, code)


def _check_slips(owner: type[Method], code: Code) -> None:
    """A name that is nearly a hook's and that nothing in the user's files calls."""
    named = _named(code)
    known = [*HOOKS, *(name for base in owner.__mro__ if base.__module__.startswith("fallow.") for name in vars(base) if name[0] != "_")]
    for name in vars(owner):
        if name.startswith("__") or any(hasattr(base, name) for base in owner.__bases__) or name in named or not code.files:
            continue
        meant = nearest(name, known)
        if meant:
            what = "the hook" if meant in HOOKS else f"{owner.__bases__[0].__name__}'s"
            raise UserError(f"{place(owner, name, code)} defines {name!r}, which nothing uses", f"did you mean {what} {meant!r}?")


def _check_step(kind: type[Method], owner: type[Method], code: Code) -> None:
    """The default plan has another step."""
    if "step" in vars(owner) and kind.plan is Method.plan and code.files and "step" not in _named(code):
        remedy = "write a `plan` that returns Plan(x=...), or name the step supervised"
        raise UserError(f"{place(owner, 'step', code)} defines a step that no plan has: the default plan makes steps of `supervised`", remedy)


def _check_arguments(owner: type[Method], code: Code) -> None:
    """A hook must take what it is called with."""
    for name, arguments in HOOKS.items():
        own = vars(owner).get(name)
        if own is None:
            continue
        if not callable(getattr(owner, name)):
            raise UserError(f"{place(owner, name, code)} makes the hook {name!r} no function", f"write def {name}(self{_listed(arguments)})")
        bound = own.__func__ if isinstance(own, classmethod | staticmethod) else own
        first = () if isinstance(own, staticmethod) else ("self",)
        try:
            signature = inspect.signature(bound)
            signature.bind(*first, *arguments)
        except TypeError:
            remedy = f"write def {name}(self{_listed(arguments)})"
            raise UserError(f"{place(owner, name, code)}: {name}{signature} cannot be called with {_words(arguments)}", remedy) from None


def _listed(arguments: tuple[str, ...]) -> str:
    return "".join(f", {a}" for a in arguments)


def _words(arguments: tuple[str, ...]) -> str:
    return " and ".join(arguments) or "nothing"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that another is one slip away from; two in a long one.

    >>> [nearest(n, [*HOOKS, "scenarios", "Options"]) for n in ("stpe", "hold", "Merge", "scenarois", "options", "augment", "agree")]
    ['step', 'holds', 'merge', 'scenarios', 'Options', None, None]
    """
    for one in known:
        slips = 1 if len(one) < 7 else 2
        if name != one and abs(len(name) - len(one)) <= slips and slipped(name.lower(), one.lower()) <= slips:
            return one
    return None


def slipped(a: str, b: str) -> int:
    """How many slips lie between two words: a letter too many, missing, another, or two swapped."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


# -- the source --------------------------------------------------------------------------------------------------------
def _named(code: Code) -> set[str]:
    """Every name that is looked up in the user's files, as `x.name`, `name` or in a text."""
    found: set[str] = set()
    for tree in _trees(code):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def _trees(code: Code) -> Iterator[ast.Module]:
    for name, data in code.files.items():
        if name.endswith(".py"):
            try:
                yield ast.parse(data)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue


def place(owner: type, name: str, code: Code) -> str:
    """Where a class defines a name, for people."""
    for file, data in code.files.items():
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
                for line in (member.lineno for member in node.body if name in _defines(member)):
                    shown = code.shown if code.file is not None and Path(code.root / file) == code.file else file
                    return f"line {line} of {shown}"
    return f"{owner.__name__} of {code.shown}"


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {t.id for t in targets if isinstance(t, ast.Name)}
