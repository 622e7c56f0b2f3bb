"""Where a command may write: what it made itself is replaced, somebody else's file only by `--force`, a run never."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from fallow.errors import UserError

# what a run's folder holds beside config.yaml, by which it is told from a result without weights or an export
AT_WORK = ("checkpoint", "federation.npz", ".lock", "keep")
RUN = ("config.yaml", "metrics.jsonl", "summary.json", "model.safetensors", "best.safetensors", "best", "tensorboard", "wandb", "tracking.json", *AT_WORK)
HEAD = 65_536  # bytes in which a file says what made it

FORCE = "choose another with {flag}, or say --force if it may be lost"


def file(path: Path, made_by: str, force: bool = False, flag: str = "-o") -> Path:
    """The path, if a file may be written there: nothing lies there, or what the same command made."""
    force = not _check_outside(path, flag) and force
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file", f"name a file with {flag}")
    if not _there(path):
        return path
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is no plain file", f"choose another with {flag}")
    if not force and not _made_by(made_by, path):
        raise UserError(f"{path} is there and was not made by `fallow {made_by}`", FORCE.format(flag=flag))
    return path


def folder(path: Path, made_by: str, names: Iterable[str], force: bool = False, flag: str = "-o") -> Path:
    """The path, if files of these names may be written to a folder there."""
    force = not _check_outside(path, flag) and force
    if _there(path) and not path.is_dir():
        raise UserError(f"{path} is a file, not a folder", f"choose another name with {flag}")
    if is_run(path) or (path / "metrics.jsonl").exists():
        raise UserError(f"{path} is a run", f"choose another folder with {flag}")
    found = [name for name in names if _there(path / name)]
    if found and not force and not _made_by(made_by, path):
        raise UserError(f"{path} holds {found[0]}, which `fallow {made_by}` did not make", FORCE.format(flag=flag))
    return path


def thinned(path: Path, run: Path | None = None) -> Path:
    """The path, if a run's thinned copy may be written there: what a run is at work in, or comes from, stays whole."""
    if is_run(path) or (run is not None and path.exists() and path.resolve() == run.resolve()):
        raise UserError(f"{path} is a run with all it holds, which a thinned copy would replace", "collect into another folder")
    _check_outside(path, "--collect")
    held = [name for name in ("config.yaml", "metrics.jsonl", "summary.json") if _there(path / name)]
    if held and not _is_config(path / "config.yaml"):
        raise UserError(f"{path} holds {held[0]}, which is no result of a run", "collect into another folder")
    return path


def is_run(path: Path) -> bool:
    """Whether a folder is one that a run works in, or has worked in; an export or a thinned result is none."""
    try:
        return (path / "config.yaml").is_file() and any((path / name).exists() for name in AT_WORK)
    except OSError:  # who may not look in may not write either, and is told so then
        return False


def no_run(path: Path, flag: str) -> None:
    """Refuses a folder for runs that is itself a run, or lies in one."""
    whole = path.resolve()
    for above in (whole, *whole.parents):
        if is_run(above):
            raise UserError(f"{path} is a run" if above == whole else f"{path} lies in the run {above}", f"choose a folder for runs with {flag}")


def _check_outside(path: Path, flag: str) -> bool:
    """Refuses a name that is a run's own, and all that lies in its checkpoints and kept records; whether a run is around it."""
    whole = path.resolve()
    around = [above for above in whole.parents if is_run(above)]
    for run in around:
        name = whole.relative_to(run).parts[0]
        if name in RUN or name.endswith(".part"):
            raise UserError(f"{path} belongs to the run {run}", f"choose another with {flag}")
    return bool(around)


def _there(path: Path) -> bool:
    """Also a link that leads nowhere."""
    try:
        return path.exists() or path.is_symlink()
    except OSError:
        return False  # too long a name, a folder that is closed: writing tells


# -- what made it ------------------------------------------------------------------------------------------------------
def _page(path: Path) -> bool:
    head = _head(path)
    return b'<meta name="generator" content="Fallow' in head or b"<title>Fallow: " in head


def _predictions(path: Path) -> bool:
    first = _head(path).partition(b"\n")[0]
    return first.startswith(b"file,label,confidence,") and first.endswith(b"error")


def _table(path: Path) -> bool:
    first = _head(path).partition(b"\n")[0]
    return b": test accuracy in %, " in first or first.startswith(b"paper,table,data,setting,method,statistic,")


def _comparison(path: Path) -> bool:
    """Of the whole file: one into which such a table was pasted is somebody's work."""
    text = _head(path)
    return (
        text.startswith(b"row,column,statistic,mean,std,n,seeds,best,")
        or (text.startswith(b"% Fallow compare; ") and text.endswith(b"\\end{tabular}\n"))
        or (re.match(rb"[^\n]+\.\n\n\|", text) is not None and text.endswith(b"\n<!-- Fallow compare -->\n"))
    )


def _export(path: Path) -> bool:
    front = re.match(rb"---\n(.*?)\n---\n", _head(path / "README.md"), re.DOTALL)
    return front is not None and b"library_name: fallow" in front[1]


def _federation(path: Path) -> bool:
    from fallow.data.holdings import Federation

    try:
        Federation.load(path)
    except UserError:
        return False
    return True


def _picture(command: str) -> Callable[[Path], bool]:
    return lambda path: f"Fallow {command}".encode() in _head(path)


MAKERS: dict[str, Callable[[Path], bool]] = {
    "report": _page,
    "predict": _predictions,
    "table": _table,
    "compare": _comparison,
    "export": _export,
    "figure": _picture("figure"),
    "check": _picture("check"),
    "split": _picture("split"),
    "split --save": _federation,
}


def _made_by(command: str, path: Path) -> bool:
    try:
        return MAKERS[command](path)
    except OSError:
        return False


def _is_config(path: Path) -> bool:
    try:
        return _head(path).startswith(b"version: ")
    except OSError:
        return False


def _head(path: Path) -> bytes:
    """The beginning and the end of a file, where formats say what made them."""
    with open(path, "rb") as f:
        begin = f.read(HEAD)
        f.seek(max(len(begin), path.stat().st_size - HEAD))
        return begin + f.read(HEAD)


def tags(command: str, kind: str) -> dict[str, str | None]:
    """What a picture of a kind (png, svg, pdf) says about itself."""
    name = f"Fallow {command}"
    return {"png": {"Software": name}, "svg": {"Creator": name, "Date": None}, "pdf": {"Creator": name}}[kind]  # type: ignore[return-value]
