"""A run's folder: settings, federation, metrics, checkpoints, result; whole after a kill at any moment."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from fallow import disk
from fallow.engine.pack import pack, unpack
from fallow.errors import UserError
from fallow.methods.state import Layout, State

Row = dict[str, Any]


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.config, self.federation = path / "config.yaml", path / "federation.npz"
        self.metrics, self.checkpoints = path / "metrics.jsonl", path / "checkpoint"
        self.model, self.summary, self.kept = path / "model.safetensors", path / "summary.json", path / "keep"

    @staticmethod
    def new(out: Path, name: str) -> RunFolder:
        """A folder of its own: `name`, or `name-2`, `name-3`, ... where that is taken."""
        try:
            with disk.told(out):
                out.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"{out} is a file, not a folder", "choose another folder with --out") from None
        number = 1
        while True:
            path = out / (name if number == 1 else f"{name}-{number}")
            try:
                with disk.told(path):
                    path.mkdir(parents=True)
                return RunFolder(path)
            except FileExistsError:
                number += 1

    @staticmethod
    def existing(path: Path) -> RunFolder:
        folder = RunFolder(path)
        if not folder.config.is_file():
            raise UserError(f"there is no run at {path}", "give the folder of a run, such as runs/NAME")
        return folder

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock of a dead process is no lock."""
        with disk.told(self.path):
            file = open(self.path / ".lock", "w")  # noqa: SIM115
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"the run {self.path} is being run by another process", "wait for it, or stop it") from None
            yield

    # -- metrics -------------------------------------------------------------------------------------------------------
    def rows(self) -> list[Row]:
        try:
            text = self.metrics.read_text()
        except FileNotFoundError:
            return []
        except UnicodeDecodeError:
            raise UserError(f"{self.metrics} is damaged", "restore the file, or start the run again") from None
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                if number == text.count("\n") + 1:  # a line cut off by a kill
                    break
                raise UserError(f"line {number} of {self.metrics} is damaged", "restore the file, or start the run again") from None
        return rows

    def append(self, row: Row) -> None:
        with disk.told(self.metrics), open(self.metrics, "a") as f:
            f.write(json.dumps(row) + "\n")

    def cut(self, rounds: int) -> None:
        """Leaves the rows of the first `rounds` rounds."""
        kept = [r for r in self.rows() if r["round"] <= rounds]
        disk.write(self.metrics, "".join(json.dumps(r) + "\n" for r in kept))

    # -- checkpoints -----------------------------------------------------------------------------------------------------
    def committed(self) -> int:
        """The last committed round (from 1), or 0."""
        if not self.checkpoints.is_dir():
            return 0
        return max((int(p.name) for p in self.checkpoints.iterdir() if p.name.isdigit()), default=0)

    def commit(self, round: int, entries: dict[str, Any], keep: dict[str, int], layouts: dict[str, Layout]) -> None:
        """Writes a new folder, syncs it, renames it, then removes the older one."""
        shape, tensors = pack(entries, layouts)
        data = save({k: t.detach().cpu().contiguous() for k, t in tensors.items()})
        index = {"round": round, "shape": shape, "keep": keep, "sha256": hashlib.sha256(data).hexdigest()}
        part, final = self.checkpoints / f".{round}.part", self.checkpoints / str(round)
        if final.is_dir():  # an interrupt came while this round was being committed
            return
        with disk.told(final):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        try:
            disk.write(part / "server.safetensors", data)
            disk.write(part / "index.json", json.dumps(index))
            disk.sync(part)
        except UserError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        with disk.told(final):
            part.rename(final)
            disk.sync(self.checkpoints)
        for old in self.checkpoints.iterdir():
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def restore(self, layouts: dict[str, Layout], device: torch.device) -> tuple[int, dict[str, Any], dict[str, int]]:
        """(round, the server's entries, the index of kept records) of the last commit."""
        path = self.checkpoints / str(self.committed())
        try:
            index = json.loads((path / "index.json").read_text())
            data = (path / "server.safetensors").read_bytes()
            if hashlib.sha256(data).hexdigest() != index["sha256"]:
                raise ValueError("checksum")
            return index["round"], unpack(index["shape"], load(data), layouts, device), index["keep"]
        except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError):
            raise UserError(
                f"the checkpoint {path} is damaged", "restore it from a copy, or start the run again with `fallow run`"
            ) from None

    # -- the result --------------------------------------------------------------------------------------------------------
    def write_model(self, state: State) -> None:
        disk.write(self.model, save({n: t.detach().cpu().contiguous() for n, t in state.tensors().items()}))

    def concluded(self) -> str | None:
        """How the run last ended; None if it never did, or left no readable summary."""
        try:
            return json.loads(self.summary.read_text()).get("status")
        except (OSError, ValueError, AttributeError):
            return None

    def write_summary(self, summary: dict[str, Any]) -> None:
        disk.write(self.summary, json.dumps(summary, indent=1) + "\n")
