"""Code of one's own, FILE.py:Class or package.module:Class: how it is found and run, and whose word it takes.

Found without being run: a file, and the files beside it that it imports. Run once per process and content. What a run's
folder or a recipe names is run only if the user has named the same content himself on this account, or says so.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from fallow.errors import UserError
from fallow.paths import open_plain

INSTALLED = {"site-packages", "dist-packages"}
SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)  # in the order in which Python takes them
FORM = "write FILE.py:Class, or module:Class"
TRUSTED = "  --trust"  # behind a line of the list: the content is trusted, and the file was named by something else
WITHIN = "/:"  # FOLDER/:module:Class is a module that is looked for in this folder first


@dataclass(frozen=True)
class Code:
    """Where a class of one's own stands, and the files that make it."""

    shown: str  # the file or module, for people
    attribute: str
    root: Path  # where its imports of neighbours start
    module: str | None  # None: a file by its path
    file: Path | None  # None: a module without one
    files: dict[str, bytes]  # by their path below the root

    @property
    def digests(self) -> dict[str, str]:
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}

    @property
    def sha256(self) -> str:
        about = self.digests or {"module": self.shown}
        return hashlib.sha256("".join(f"{name}\0{about[name]}\n" for name in sorted(about)).encode()).hexdigest()


def line(error: BaseException, code: Code) -> str:
    """Where in one's own files an error arose, to stand before it; nothing if it did not."""
    files = {str(code.root / name) for name in code.files}
    found = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f"line {found[-1].lineno} of {Path(found[-1].filename).name}: " if found else ""


# -- finding -----------------------------------------------------------------------------------------------------------
def find(name: str, what: str) -> Code:
    """The code that a name stands for, not yet run; `what` is it: a method, a model."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise UserError(f"{name!r} names no {what}", FORM)
    if is_file(where):
        return _of_file(where, attribute, what)
    folder, within, module = where.rpartition(WITHIN)
    return _of_module(module, attribute, what, Path(folder or "/") if within else None)


def is_file(where: str) -> bool:
    return where.endswith(".py") or ("/" in where and WITHIN not in where)


def located(name: str, base: Path) -> str:
    """The same code, named so that it is found from any folder."""
    where, _, attribute = name.rpartition(":")
    if is_file(where):
        return f"{_expanded(where, base)}:{attribute}"
    top = where.partition(".")[0]
    beside = WITHIN not in where and top.isidentifier() and PathFinder.find_spec(top, [str(base)]) is not None
    return f"{base}{WITHIN}{name}" if beside else name


def _expanded(where: str, base: Path) -> Path:
    try:
        return base / Path(where).expanduser()
    except RuntimeError:  # ~nobody
        return base / where


def _of_file(where: str, attribute: str, what: str) -> Code:
    path = _expanded(where, Path.cwd())
    if not path.is_file():
        raise UserError(f"there is no file {Path(where)} for the {what} {attribute}", "check the path before the colon")
    path, here = path.resolve(), Path.cwd().resolve()
    shown = path.relative_to(here) if here in path.parents else path
    return Code(str(shown), attribute, path.parent, None, path, _files(path, path.parent, ""))


def _of_module(module: str, attribute: str, what: str, folder: Path | None) -> Code:
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"{module!r} is no name of a module for the {what} {attribute}", FORM)
    for root in (*([folder] if folder else [Path.cwd()]), *(Path(p or ".") for p in sys.path)):
        if (spec := _spec(module, root)) and spec.origin and Path(spec.origin).is_file():
            file = Path(spec.origin).resolve()
            package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
            root = file.parents[module.count(".") + (package == module)]
            return Code(module, attribute, root, module, file, _files(file, root, package))
    if module in sys.modules:  # made by a notebook, or part of Python
        return Code(module, attribute, Path.cwd(), module, None, {})
    raise UserError(f"there is no module {module!r} for the {what} {attribute}", "install it, or give a file as ./FILE.py:Class")


def _spec(module: str, root: Path) -> ModuleSpec | None:
    """As Python finds it, but without running the packages above it."""
    spec, name, places = None, "", [str(root)]
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def _files(file: Path, root: Path, package: str) -> dict[str, bytes]:
    """A file and those below the root that it imports, they in turn too; of an installed package only its own."""
    installed = bool(INSTALLED & set(root.parts)) or Path(sysconfig.get_path("stdlib")) in (root, *root.parents)
    only = package.partition(".")[0] if installed else None
    found: dict[str, bytes] = {}
    waiting = [(file, package)]
    while waiting:
        path, inside = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        try:
            with open_plain(path) as open_file:
                found[name] = open_file.read()
        except OSError as e:
            raise UserError(f"{path} cannot be read ({e.strerror})", "change its permissions") from None
        for module in _imports(found[name], inside) if path.suffix == ".py" else ():
            top = module.partition(".")[0]
            if top != "fallow" and only in (None, top):
                waiting += _modules(module, root)
    return found


def _imports(source: bytes, package: str) -> list[str]:
    """The modules that a source names, in full."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*filter(None, above), *([node.module] if node.module else [])])
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)] if module else []
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.args[0].value  # import_module("helpers"): a file is among the others even if the call is another one
            found += [f"{package}{called}" if called.startswith(".") else called] if called.replace(".", "").isidentifier() else []
    return found


def _modules(module: str, root: Path) -> Iterator[tuple[Path, str]]:
    """The files of a module and of the packages above it, as far as they lie below the root, with their packages."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        place, inside = root.joinpath(*parts[:depth]), ".".join(parts[:depth])
        files = [(place / f"__init__{suffix}", inside) for suffix in SUFFIXES]
        files += [(place.with_name(f"{place.name}{suffix}"), inside.rpartition(".")[0]) for suffix in SUFFIXES]
        yield from [found for found in files if found[0].is_file()][:1]


# -- running -----------------------------------------------------------------------------------------------------------
_run: dict[tuple[str, str], ModuleType] = {}  # by file and content
_content: dict[Path, bytes] = {}  # of the files that were run


def load(name: str, what: str) -> tuple[Any, Code]:
    """The object of that name, or None where the module has none such; its module is run once per content."""
    code = find(name, what)
    key = (str(code.file or code.shown), code.sha256)
    if key not in _run:
        _forget_changed(code)
        with told(code):
            _run[key] = _imported(code) if code.module else _executed(code)
        _content.update({code.root / name: data for name, data in code.files.items()})
    return getattr(_run[key], code.attribute, None), code


def forget(name: str, what: str) -> None:
    """Has the code of that name run anew when it is loaded next."""
    code = find(name, what)
    module = _run.pop((str(code.file or code.shown), code.sha256), None)
    if module is not None and code.file is not None:
        sys.modules.pop(module.__name__, None)


def public(name: str, what: str) -> list[str]:
    """What a module offers to be called, for suggestions."""
    code = find(name, what)
    return [n for n, v in vars(_run[str(code.file or code.shown), code.sha256]).items() if n[0] != "_" and callable(v)]


def _forget_changed(code: Code) -> None:
    """Lets modules whose file has changed since they were run be imported anew."""
    changed = {code.root / name for name, data in code.files.items() if _content.get(code.root / name, data) != data}
    for module in [n for n, m in sys.modules.items() if Path(getattr(m, "__file__", None) or "/") in changed]:
        del sys.modules[module]
    importlib.invalidate_caches()


def _executed(code: Code) -> ModuleType:
    assert code.file is not None
    name = f"fallow_own_{code.file.stem}_{code.sha256[:12]}"
    module = ModuleType(name)
    module.__file__ = str(code.file)
    _let_find_neighbours(code)
    sys.modules[name] = module
    try:
        exec(compile(code.files[code.file.name], str(code.file), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _imported(code: Code) -> ModuleType:
    assert code.module is not None
    ours = [n for n in (code.module, code.module.partition(".")[0]) if n in sys.modules]
    for name in ours:
        there = getattr(sys.modules[name], "__file__", None)
        if code.file and there and code.root not in Path(there).resolve().parents:
            if Path(there).resolve() not in _content:
                raise UserError(f"another module {name!r} is loaded, of {there}", "give the other one as FILE.py:Class, or begin a new process")
            for old in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
                del sys.modules[old]
    with _first(code):
        return importlib.import_module(code.module)


@contextmanager
def _first(code: Code) -> Iterator[None]:
    """Has a module be found here rather than elsewhere, while it is imported; its neighbours later on, too."""
    finders, paths = list(sys.meta_path), list(sys.path)
    if _is_at_home(code):
        sys.path.insert(0, str(code.root))
    else:
        sys.meta_path.insert(0, Neighbours(code))
    try:
        yield
    finally:
        sys.meta_path[:], sys.path[:] = finders, paths
        _let_find_neighbours(code)


def _let_find_neighbours(code: Code) -> None:
    """After all that is installed. Where the user has not named the file himself a module beside it is none that he has seen."""
    if str(code.root) in sys.path:
        return
    if _is_at_home(code):
        sys.path.append(str(code.root))
    else:
        sys.meta_path.append(Neighbours(code))


class Neighbours:
    """Finds the modules beside own code that are part of it, and no others: not what some package would import if it were there."""

    def __init__(self, code: Code):
        self.root, self.files = code.root, code.files.keys()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = None if path is not None else PathFinder.find_spec(name, [str(self.root)])
        if spec is None:
            return None
        if spec.origin is None:  # a folder without an __init__
            return spec if any(file.startswith(f"{name}/") for file in self.files) else None
        return spec if any(Path(spec.origin) == self.root / file for file in self.files) else None


@contextmanager
def told(code: Code) -> Iterator[None]:
    """What goes wrong in code of one's own while it is loaded or builds a model: one sentence with file and line."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as e:
        shown = code.shown if e.filename in (None, str(code.file)) else e.filename
        raise UserError(f"{shown} is not valid Python in line {e.lineno or 1} ({e.msg})", "mend the file") from e
    except (Exception, SystemExit) as e:
        own = {str(code.root / name) for name in code.files}
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename in own]
        at = f"line {frames[-1].lineno} of {_shown(code, frames[-1].filename)}" if frames else code.shown
        why = next(iter(str(e).splitlines()), "")[:300]
        remedy = "install what it imports, or mend the file" if isinstance(e, ImportError) else "mend the file"
        raise UserError(f"{at} fails ({type(e).__name__}{': ' if why else ''}{why})", remedy) from e


def _shown(code: Code, file: str) -> str:
    return code.shown if file == str(code.file) else file


# -- trust -------------------------------------------------------------------------------------------------------------
_named: set[str] = set()  # contents that were named in this process
_homes: set[str] = set()  # files that the user has named himself


def trusted_list() -> Path:
    """Contents that this user has named, one per line."""
    home = os.environ.get("FALLOW_HOME")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    return (Path(home) if home else config / "fallow").expanduser() / "trusted"


def named(name: str, what: str) -> None:
    """The user names this code himself: its content is his own from now on, in later processes too."""
    code = find(name, what)
    _homes.add(str(code.file or code.shown))
    _remember(code)


def check(name: str, what: str, by: str, trust: bool) -> None:
    """Code that something else than the user names is run only if he has named the same content, or trusts it."""
    code = find(name, what)
    if trust:
        _remember(code)
    elif code.sha256 not in _named | _listed():
        place = f"{code.file or code.shown}:{code.attribute}"
        raise UserError(
            f"{by} names code that would run with your rights, the {what} {place}",
            "read it, and if you trust it say --trust (in Python trust=True)",
        )


def _remember(code: Code) -> None:
    _named.add(code.sha256)
    line = f"{code.sha256}  {str(code.file or code.shown)!a}"
    home = str(code.file or code.shown) in _homes
    if code.sha256 not in _listed() or (home and line not in _lines()):
        with suppress(OSError, RuntimeError):  # then this process alone remembers
            path = trusted_list()
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as f:
                f.write(f"{line}{'' if home else TRUSTED}\n")


def _is_at_home(code: Code) -> bool:
    """Whether the user has named this very file himself, and not a copy of it that came from elsewhere."""
    where = str(code.file or code.shown)
    return where in _homes or f"{code.sha256}  {where!a}" in _lines()


def _listed() -> set[str]:
    return {line[:64] for line in _lines()}


def _lines() -> list[str]:
    try:
        return trusted_list().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):
        return []
