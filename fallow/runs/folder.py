"""A run's folder: settings, federation, metrics, checkpoints, result; whole after a kill at any moment."""

from __future__ import annotations

import fcntl
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from fallow import disk, targets
from fallow.engine.evaluating import Best
from fallow.engine.finite import defined
from fallow.engine.pack import apart, pack, unpack
from fallow.errors import UserError
from fallow.methods.state import Layout, State
from fallow.runs import best as bests
from fallow.runs import manifest
from fallow.runs.manifest import RESTORE, Manifest
from fallow.runs.metrics import MetricsFile, Row, is_summary, laid_out
from fallow.runs.origin import prolonged
from fallow.runs.settings import settings_sha256
from fallow.said import warn

FIXED = ("federation.npz",)  # patterns of files that are written before round 1 and never again
SERVER = "server.safetensors"
HALF = re.compile(r"\..*\.part|federation\.npz.*\.part", re.DOTALL)  # what a kill leaves half written


class Busy(UserError):
    """Another process is at work in the folder."""


class Restored(NamedTuple):
    """What a checkpoint holds."""

    round: int
    entries: dict[str, Any]
    keep: dict[str, int]  # client -> round of its record
    records: dict[str, str]  # SHA-256 of the records' files
    best: Best | None


class RunFolder:
    def __init__(self, path: Path):
        self.path, self.manifest = path, path / manifest.NAME
        self._noted: Manifest | None = None  # what the manifest says of settings and files that stay as they are
        self._results: dict[str, str] = {}
        self._records: dict[int, set[str]] = {}  # names of the records that each of the last checkpoints needs
        self.best_files = bests.BestFiles(path)
        self._bests: dict[int, set[str]] = {}  # what each of the last checkpoints calls the best round's weights
        self._covered: Manifest | None = None  # of the metrics, at the last commit
        self._chosen: Manifest | None = None  # the index of the checkpoint to go on from
        self._complaints: list[str] = []  # what was found damaged and is mended, told once it can be
        self.config, self.federation = path / "config.yaml", path / "federation.npz"
        self.metrics_file, self.checkpoints = MetricsFile(path / "metrics.jsonl"), path / "checkpoint"
        self.metrics, self.best = self.metrics_file.path, path / bests.RESULT
        self.model, self.summary, self.kept = path / "model.safetensors", path / "summary.json", path / "keep"

    @staticmethod
    def new(out: Path, name: str) -> RunFolder:
        """A folder of its own: `name`, or `name-2`, `name-3`, ... where that is taken."""
        targets.no_run((out / name).parent, "--out")
        try:
            with disk.errors_as_user_errors(out):
                out.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"{out} is a file, not a folder", "choose another folder with --out") from None
        for number in itertools.count(1):
            path = out / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError), disk.errors_as_user_errors(path):
                path.mkdir(parents=True)
                break
        return RunFolder(path)

    @staticmethod
    def existing(path: Path) -> RunFolder:
        if not RunFolder(path).config.is_file():
            such = next((below.parent for below in path.glob("*/config.yaml")), "runs/NAME")
            raise UserError(f"there is no run at {path}", f"give the folder of a run, such as {such}")
        return RunFolder(path)

    def remove(self) -> None:
        disk.remove(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock of a dead process is no lock."""
        lock = self.path / ".lock"
        with ExitStack() as stack:
            with disk.errors_as_user_errors(lock, "see what lies there in the lock's place, and whether the folder may be written"):
                file = stack.enter_context(disk.opened(lock))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"the run {self.path} is being run by another process", "wait for it, or stop it") from None
            yield

    # -- metrics -------------------------------------------------------------------------------------------------------
    def rows(self) -> list[Row]:
        return self.metrics_file.rows(self.noted() if self.metrics.exists() else None)

    def append(self, row: Row) -> None:
        self.metrics_file.append(row)

    def cut(self, rounds: int) -> None:
        """Leaves the rows of the first `rounds` rounds."""
        self.metrics_file.cut(rounds)

    # -- checksums -------------------------------------------------------------------------------------------------------
    def noted(self) -> Manifest | None:
        """The run's manifest; thinned results and runs of older versions have none."""
        if not self.manifest.exists():
            return None
        return manifest.unsealed(self.manifest)

    def is_export(self) -> bool:
        """A manifest that cannot be read is no export's."""
        with suppress(UserError):
            return bool((self.noted() or {}).get("export"))
        return False

    def begin(self) -> None:
        """Notes settings and federation, before the first round."""
        self.write_manifest()
        disk.sync(self.path.parent)

    def write_manifest(self) -> None:
        """Notes what lies in the folder, after it was written, so that all of it lasts."""
        noted = self._unchanging() | {"metrics": self._covered or {"bytes": 0, "sha256": manifest.sha256(b"")}}
        disk.write(self.manifest, manifest.sealed(noted | {"files": noted["files"] | self._results}))
        disk.sync(self.path)

    def _unchanging(self) -> Manifest:
        """What a manifest says of settings and files that no round changes; read once."""
        if self._noted is None:
            paths = sorted(p for pattern in FIXED for p in self.path.glob(pattern) if p.is_file())
            files = {str(p.relative_to(self.path)): manifest.sha256(disk.read(p)) for p in paths}
            self._noted = {"config": settings_sha256(self.config) if self.config.is_file() else None, "files": files}
        return self._noted

    def verified(self, name: str, needs_manifest: bool = False) -> bytes:
        """The bytes of a file as the manifest has them; of a folder without one as they are, unless it needs one."""
        remedy = f"restore it from a copy, or write it anew with `fallow resume {self.path}`"
        try:
            noted = self.noted()
        except UserError as e:
            raise UserError(e.cause, remedy) from None
        if noted is None:
            if needs_manifest:
                cause = f"{self.path} has no {manifest.NAME}, so nobody can tell whether {name} is whole (older versions wrote none)"
                raise UserError(cause, f"write it with `fallow resume {self.path}`, or run or export it again")
            return disk.read(self.path / name)
        if noted.get("export"):
            remedy = "restore it from a copy, or export the run again"
        data = disk.read(self.path / name, remedy)
        if name in noted["files"] and manifest.sha256(data) == noted["files"][name]:
            return data
        raise manifest.damaged(self.path / name, remedy)

    def check_settings(self, noted: Manifest | None = None) -> None:
        """config.yaml must be the one that the manifest knows."""
        if (noted := noted or self.noted()) is not None:
            manifest.check_settings(self.config, noted["config"], prolonged(self.path))

    # -- checkpoints -----------------------------------------------------------------------------------------------------
    def committed(self) -> int:
        """The last committed round (from 1), or 0."""
        return max(self._rounds(), default=0)

    def _rounds(self) -> list[int]:
        """The rounds of which there is a checkpoint, the last first."""
        if not self.checkpoints.is_dir():
            return []
        names = [p.name for p in self.checkpoints.iterdir()]
        return sorted((int(n) for n in names if n.isascii() and n.isdecimal() and n == str(int(n)) and n != "0"), reverse=True)

    def commit(
        self, round: int, entries: dict[str, Any], keep: dict[str, int], layouts: dict[str, Layout], records: Mapping[str, str],
        best: Best | None = None,
    ) -> None:  # fmt: skip
        """Writes a new folder with checksums of all that the state is made of, syncs it, renames it; of the older ones the last stays."""
        part, final = self.checkpoints / f".{round}.part", self.checkpoints / str(round)
        if final.is_dir():  # an interrupt came while this round was being committed
            return
        shape, tensors = pack(entries, layouts)
        data = save(apart(tensors))
        noted, first = self._unchanging(), not self.checkpoints.is_dir()
        metrics = self.metrics_file.covered()
        weights = self.best_files.write(best)
        with disk.errors_as_user_errors(final):
            disk.remove(part)
            part.mkdir(parents=True)
        try:
            with disk.beside() as thread:
                synced = thread.submit(disk.sync, self.metrics if self.metrics.exists() else self.path)
                digest = disk.write_noting(part / SERVER, data, thread)
                synced.result()
            files = {f"checkpoint/{round}/{SERVER}": digest, **{f"keep/{n}": known for n, known in records.items()}, **weights}
            index = noted | {"round": round, "shape": shape, "keep": keep, "metrics": metrics, "files": noted["files"] | files}
            index |= {"best": best.noted()} if best else {}
            disk.write(part / "index.json", manifest.sealed(index))
            disk.sync(part)
        except UserError:
            disk.remove(part)
            raise
        with disk.errors_as_user_errors(final):
            part.rename(final)
            disk.sync(self.checkpoints)
            if first:  # later on the run's folder has no new entries
                disk.sync(self.path)
        self._covered, self._records[round], self._bests[round] = metrics, set(records), set(weights)
        self._prune(round)

    def _prune(self, last: int) -> None:
        """Of the checkpoints the last stays and the one before it; what a kill has left half written goes."""
        rounds = self._rounds()
        stay = [last, *(r for r in rounds if r < last)][:2]
        for old in (r for r in rounds if r not in stay):
            disk.remove(self.checkpoints / str(old))
        for folder in (self.checkpoints, self.path):
            disk.clean(folder, HALF)
        self._records = {r: names for r, names in self._records.items() if r in stay}
        self._bests = {r: names for r, names in self._bests.items() if r in stay}
        self.best_files.clean(set().union(*self._bests.values()))

    def needed(self) -> set[str]:
        """The names of the records that the last checkpoints need."""
        return set().union(*self._records.values())

    def choose(self) -> Manifest | None:
        """The index of the last checkpoint that is whole in all that it names; a damaged one before which another is whole is told.

        None where there is no checkpoint. What is damaged without a way back is a UserError.
        """
        complaints: list[UserError] = []
        for round in self._rounds():
            try:
                found = self._whole(round)
                break
            except UserError as e:
                complaints.append(e)
        else:
            if complaints:
                raise complaints[0]
            return None
        self._complaints += [f"{c.cause}; going on from the checkpoint before it, of round {found['round']}" for c in complaints]
        return found

    def _whole(self, round: int) -> Manifest:
        """The index of a checkpoint if nothing that it names has changed."""
        path = self.checkpoints / str(round) / "index.json"
        index = manifest.unsealed(path)
        if index["round"] != round:
            raise manifest.damaged(path)
        self.check_settings(index)
        made_again = {} if self.federation.exists() else {self.federation.name}
        manifest.check_files(self.path, {name: digest for name, digest in index["files"].items() if name not in made_again})
        self.metrics_file.check(index, disk.read(self.metrics, RESTORE))
        return index

    def check_begun(self) -> Manifest | None:
        """Settings and federation are those the run was begun with, or are made again; what vouches for them."""
        self._check_plain()
        try:
            noted = self.noted()
        except UserError as e:
            self._complaints.append(f"{e.cause}; it is written again")
            noted = None
        if noted is not None:
            if noted.get("export"):
                raise UserError(f"{self.path} is an export, which has no rounds to go on with", "give the folder of the run itself")
            self.check_settings(noted)
            results = (self.model.name, self.best.name, self.summary.name)
            self._results = {name: noted["files"][name] for name in results if name in noted["files"]}
            self.check_fixed(noted)
        self._chosen = self.choose()
        if noted is None and self._chosen is None:
            if self.summary.exists():
                raise UserError(f"{self.path} has a summary but no checkpoint, as thinned results have", "give the folder of the run itself")
            self.federation.unlink(missing_ok=True)  # the run was cut off before it began
        return noted or self._chosen

    def _check_plain(self) -> None:
        """What is written in the end must not be in the way of something else."""
        for path in (self.manifest, self.metrics, self.model, self.summary):
            if path.exists() and not path.is_file():
                raise UserError(f"{path} is not a file", "take it away, then continue with `fallow resume`")

    def check_fixed(self, noted: Manifest | None, made: bool = False) -> None:
        """The files of before round 1; a federation that is not there is made again, to the same bytes."""
        made_again = set() if made or self.federation.exists() else {self.federation.name}
        files = {n: d for n, d in noted["files"].items() if any(Path(n).match(p) for p in FIXED) and n not in made_again} if noted else {}
        remedy = f"restore it from a copy, or delete {self.federation.name}, which is then made again from settings and data"
        manifest.check_files(self.path, files, "start the run again" if made else remedy)

    def tell(self) -> None:
        """Says what was damaged and is mended by going on."""
        for complaint in self._complaints:
            warn(complaint)
        self._complaints = []

    def restore(self, layouts: dict[str, Layout], device: torch.device) -> Restored | None:
        """The last whole checkpoint, with the metrics of its rounds; what came after it is removed."""
        index = self._chosen or self.choose()
        self.tell()
        if index is None:
            self.cut(0)
            self.write_manifest()
            return None
        round = index["round"]
        path = self.checkpoints / str(round) / SERVER
        try:
            entries = unpack(index["shape"], load(disk.read(path)), layouts, device)
        except (ValueError, KeyError, TypeError, RuntimeError):
            raise UserError(f"the checkpoint {path.parent} does not fit the model and the method", "put back the code that began the run") from None
        for newer in self._rounds():
            if newer > round:
                disk.remove(self.checkpoints / str(newer))
        self.metrics_file.leave(disk.read(self.metrics)[: index["metrics"]["bytes"]])
        self._covered = index["metrics"]
        self.write_manifest()
        self._needs(round, index)
        for older in self._rounds()[1:2]:
            with suppress(UserError):
                self._needs(older, manifest.unsealed(self.checkpoints / str(older) / "index.json"))
        self._prune(round)
        return Restored(round, entries, index["keep"], _records(index), self.best_files.restore(index))

    def _needs(self, round: int, index: Manifest) -> None:
        self._records[round] = set(_records(index))
        self._bests[round] = {name for name in index["files"] if name.startswith(f"{bests.FOLDER}/")}

    # -- the result --------------------------------------------------------------------------------------------------------
    def write_model(self, state: State) -> None:
        self._write_result(self.model, bests.encoded(state))

    def write_best(self, best: Best | None) -> Best | None:
        """The weights of the best round, as the last checkpoint has them; None where it has none."""
        if best is None or best.state is not None:
            return None
        self._write_result(self.best, self.best_files.read(best))
        return best

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write_result(self.summary, (laid_out(defined(summary)) + "\n").encode())

    def _write_result(self, path: Path, data: bytes) -> None:
        disk.write(path, data)
        self._results[path.name] = manifest.sha256(data)

    def read_summary(self) -> dict[str, Any]:
        """What the run came to; FileNotFoundError where it has not ended, ValueError where that cannot be read."""
        if not self.summary.exists():
            raise FileNotFoundError(self.summary)
        try:
            summary = json.loads(self.verified(self.summary.name))
        except (UserError, ValueError, RecursionError) as e:
            raise ValueError(str(e)) from None
        if not is_summary(summary):
            raise ValueError("incomplete")
        return summary

    def concluded(self) -> str | None:
        """How the run last ended; None if it never did, or left no readable summary."""
        try:
            return self.read_summary()["status"]
        except (OSError, ValueError):
            return None

    def finished(self, rounds: int) -> bool:
        """Whether there is nothing left to do: the last round is committed and the result is there, all of it whole."""
        try:
            if self.committed() < rounds or not self.federation.exists() or not self._whole(self.committed()):
                return False
        except UserError:
            return False  # told when the checkpoints are looked at
        try:
            if self.read_summary()["status"] != "finished":
                return False
            self.verified(self.model.name, needs_manifest=True)
            if self.best.name in (self.noted() or {"files": {}})["files"]:
                self.verified(self.best.name)
            return True
        except FileNotFoundError:
            return False
        except (UserError, ValueError) as e:
            cause = e.cause if isinstance(e, UserError) else f"{self.summary} is not the one that {manifest.NAME} names"
            self._complaints.append(f"{cause}; it is written again from the checkpoint")
            return False


def _records(index: Manifest) -> dict[str, str]:
    return {name.removeprefix("keep/"): digest for name, digest in index["files"].items() if name.startswith("keep/")}
