"""What a run was made from, origin.json in its folder: digests of data, settings and own code, and where it was started.

Resume and every rank compare; own/ has a copy of the user's own code.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fallow import disk, methods, models, own
from fallow.config import Config
from fallow.data.sources import Source
from fallow.errors import UserError
from fallow.methods.state import State
from fallow.trees import flat

ANYWAY = "or go on with it as it is with --anyway (in Python anyway=True)"
FILES = ("folder", "csv", "numpy")  # kinds of data that name a path
Record = dict[str, Any]


# -- digests -----------------------------------------------------------------------------------------------------------
def data_digests(source: Source) -> dict[str, str]:
    """SHA-256 of each part of a data set, by its name for people."""
    parts = {
        "training images": source.train.images, "training labels": source.train.labels,
        "test images": source.test.images, "test labels": source.test.labels,
    }  # fmt: skip
    texts = {"class names": list(source.classes), "clients": source.train.clients and list(source.train.clients)}
    return {k: _tensor(t) for k, t in parts.items()} | {k: _text(json.dumps(v)) for k, v in texts.items()}


def _tensor(tensor: torch.Tensor) -> str:
    array = tensor.detach().cpu().contiguous().numpy()
    found = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    found.update(array.reshape(-1).view("u1").data)
    return found.hexdigest()


def _text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@cache
def versions() -> dict[str, str]:
    """Of what computes; Fallow's by its source, since a checkout has many."""
    root = Path(__file__).parents[1]
    source = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        source.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return {"Python": platform.python_version(), "torch": str(torch.__version__), "Fallow's source": source.hexdigest()[:12]}


# -- where things are --------------------------------------------------------------------------------------------------
def located(options: Config, base: Path) -> Config:
    """The settings with paths that hold from any folder."""
    changes: Record = {}
    kind, _, rest = options.data.partition(":")
    if kind in FILES and rest:
        changes["data"] = f"{kind}:{_absolute(rest, base)}"
    if options.data_dir:
        changes["data_dir"] = str(_absolute(options.data_dir, base))
    for what, module in (("method", methods), ("model", models)):
        if module.is_own(name := getattr(options, what)):
            changes[what] = own.located(name, base)
    return options.model_copy(update=changes)


def _absolute(path: str, base: Path) -> Path:
    try:
        return base / Path(path).expanduser()
    except RuntimeError:  # ~nobody
        return base / path


# -- the record --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Origin:
    """What a run was made from."""

    started_in: str
    settings: Record
    data: dict[str, str]
    shape: list[int]  # of the training images, and how many classes
    code: dict[str, Record]  # method, model: its name, and the digests of its files
    method: dict[str, str]  # its class and paper
    changed: list[Record]  # what a resume was told to take anyway

    @staticmethod
    def of(options: Config, method: type[methods.Method], source: Source) -> Origin:
        """Of a run that begins here and now."""
        here = Path.cwd()
        code = {what: {"name": name, "files": own.find(name, what).digests} for what, name in own_code(located(options, here)).items()}
        shape = [*source.train.images.shape, len(source.classes)]
        about = {"name": method.__name__, "paper": method.paper}
        return Origin(str(here), options.model_dump(mode="json"), data_digests(source), shape, code, about, [])

    @staticmethod
    def read(folder: Path) -> Origin | None:
        """Of a run's folder; None for one of an older version, which has none."""
        path = folder / "origin.json"
        if not path.exists():
            return None
        try:
            found = json.loads(disk.read(path))
            if found.pop("sha256") != _text(json.dumps(found, sort_keys=True)):
                raise ValueError("checksum")
            return Origin(**found)
        except (UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path} is damaged", "restore it from a copy, or start the run again with `fallow run`") from None

    def write(self, folder: Path) -> None:
        """Into a new run's folder, with a copy of the user's own code."""
        for what, has in self.code.items():
            for name, data in own.find(has["name"], what).files.items():
                target = folder / "own" / what / name
                with disk.errors_as_user_errors(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                disk.write(target, data)
        self._write(folder)

    def _write(self, folder: Path) -> None:
        tree = asdict(self)
        tree["sha256"] = _text(json.dumps(tree, sort_keys=True))
        disk.write(folder / "origin.json", json.dumps(tree, indent=1) + "\n")

    # -- comparing -----------------------------------------------------------------------------------------------------
    def check_settings(self, now: Config, editable: set[str]) -> None:
        """Keys cannot be changed on resume, those aside that change no result."""
        settings = {k: field.get_default() for k, field in Config.model_fields.items() if k not in self.settings} | self.settings
        if any(now.rounds in note.get("rounds", ()) for note in self.changed):  # longer.py
            settings["rounds"] = now.rounds
        found, was = flat(now.model_dump(mode="json")), flat(settings)
        keys = [k for k in found | was if found.get(k) != was.get(k) and k.partition(".")[0] not in editable]
        if keys:
            k = keys[0]
            told = f"config.yaml has {k}={found.get(k)} where the run was begun with {k}={was.get(k)}"
            raise UserError(told, "put the old value back, or start a new run")

    def check_code(self, now: Config, folder: Path, anyway: bool) -> list[str]:
        """The user's own files must be those that the run was begun with."""
        told = []
        for what, name in own_code(now).items():
            if what not in self.code:
                continue
            code, had = own.find(name, what), self.code[what]["files"]
            has = code.digests
            files = [str(code.root / f) for f in sorted(has | had) if has.get(f) != had.get(f)]
            told += [f"the {what}'s file {', '.join(files)} is not as it was when the run was begun"] if files else []
        return _refused(told, f"put the old one back (a copy is in {folder / 'own'}), start a new run", anyway)

    def check_data(self, source: Source, anyway: bool) -> list[str]:
        differ = [k for k, v in data_digests(source).items() if self.data.get(k) != v]
        if not differ:
            return []
        if [*source.train.images.shape, len(source.classes)] != self.shape:
            anyway, way = False, "put the old files back, or start a new run"
        else:
            way = f"put the old files back, start a new run, {ANYWAY}"
        told = f"of the data set {source.name} the {_listed(differ)} are not as when the run was begun"
        if not anyway:
            raise UserError(told, way)
        return [told]

    def taken_anyway(self, round: int, told: list[str], folder: Path) -> None:
        """Notes what a resume goes on with that the run was not begun with."""
        if told:
            self.note({"after_round": round, "differs": told}, folder)

    def note(self, note: Record, folder: Path) -> None:
        """Adds to what is changed, unless it is there."""
        if note not in self.changed:
            replace(self, changed=[*self.changed, note])._write(folder)


def check_model(fresh: Any, kept: Any, folder: Path) -> None:
    """A checkpoint's model must fit the model that the settings name, whatever was said."""
    if not (isinstance(fresh, State) and isinstance(kept, State)):
        return
    both = fresh.groups.keys() & kept.groups.keys()  # static statistics come with the rounds
    if any(fresh.groups[name].shape != kept.groups[name].shape for name in both):
        raise UserError(f"the checkpoint of {folder} is of another model than config.yaml names", "put the old model back, or start a new run")


def _refused(told: list[str], remedy: str, anyway: bool) -> list[str]:
    if told and not anyway:
        raise UserError(told[0], f"{remedy}, {ANYWAY}")
    return told


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def own_code(options: Config) -> dict[str, str]:
    """The names of the user's own code in settings: method, model."""
    both = {"method": methods.is_own(options.method), "model": models.is_own(options.model)}
    return {what: getattr(options, what) for what, is_own in both.items() if is_own}


# -- of a folder -------------------------------------------------------------------------------------------------------
def prolonged(folder: Path) -> frozenset[str]:
    """The digests of settings that differ by how many rounds this run was given."""
    origin = Origin.read(folder)
    return frozenset(digest for note in (origin.changed if origin else ()) for digest in note.get("config", ()))


def started_in(folder: Path) -> Path | None:
    origin = Origin.read(folder)
    return Path(origin.started_in) if origin else None


def model_name(folder: Path, options: Config) -> str:
    """A model of one's own as the run had it: its file if that is unchanged, else the copy in the run's folder."""
    origin = Origin.read(folder)
    if origin is None or "model" not in origin.code or not models.is_own(options.model):
        return options.model
    has, copies = origin.code["model"], (folder / "own" / "model").resolve()
    where, _, attribute = has["name"].rpartition(":")
    copy = f"{copies / Path(where).name}:{attribute}" if own.is_file(where) else f"{copies}{own.WITHIN}{where.rpartition(own.WITHIN)[2]}:{attribute}"
    for name in (has["name"], copy):
        try:
            if own.find(name, "model").digests == has["files"]:
                return name
        except UserError:
            continue
    raise UserError(f"the model's file is not as it was when the run {folder} was begun, nor is the copy in {copies}", "put the old one back")


# -- ranks -------------------------------------------------------------------------------------------------------------
def for_ranks(options: Config, source: Source) -> Record:
    """What other ranks compare with theirs; `options` are located."""
    code = {what: own.find(name, what).digests for what, name in own_code(options).items()}
    return {"versions": versions(), "code": code, "data": data_digests(source)}


def check_rank_code(options: Config, told: Record) -> None:
    """Before any of it is run: this rank has rank 0's versions and files."""
    for name, version in versions().items():
        if told["versions"].get(name) != version:
            raise UserError(f"{name} is {version}, where rank 0 has {told['versions'].get(name)}", "install the same versions for every rank")
    for what, name in own_code(options).items():
        if own.find(name, what).digests != told["code"].get(what):
            raise UserError(f"the {what}'s file {name.rpartition(':')[0]} is another one than rank 0's", "give every rank the same file")


def check_rank_data(source: Source, told: Record) -> None:
    if differ := [k for k, v in data_digests(source).items() if told["data"].get(k) != v]:
        raise UserError(f"of the data set {source.name} the {_listed(differ)} differ from rank 0's", "give every rank the same files")
