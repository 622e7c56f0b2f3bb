"""What clients keep between their rounds, and what the server has of each: records in memory up to a budget, beyond that in files.

A record's file carries the round that wrote it, so new versions stand beside old ones until a checkpoint commits the
index; what neither it nor the checkpoint before it names is never read and is removed. A record is read with the checksum
it was written with. Clients that never took part cost nothing.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fallow import disk
from fallow.engine.pack import apart, pack, size, unpack
from fallow.errors import UserError
from fallow.methods.state import Layout

Record = dict[str, Any]
Owner = int | str  # a client; `pool-3` for what the server has of client 3
OURS = re.compile(r"(pool-)?\d+-\d+\.safetensors|\..*\.part")  # what lies in the folder and is called otherwise was put there by others


class Keep:
    def __init__(self, folder: Path, budget: float, layouts: dict[str, Layout], device: torch.device):
        self.folder, self.budget, self.layouts, self.device = folder, budget, layouts, device
        self.version: dict[Owner, int] = {}  # owner -> round that wrote the record
        self.committed: list[dict[Owner, int]] = []  # the versions at the last two commits: what a checkpoint may go back to
        self.records: dict[str, str] = {}  # SHA-256 of the files, by name; older versions among them until `clean`
        self._memory: OrderedDict[Owner, Record] = OrderedDict()
        self._bytes = 0
        self._unsaved: set[Owner] = set()

    def read(self, owner: Owner) -> Record:
        if owner in self._memory:
            self._memory.move_to_end(owner)
            return self._memory[owner]
        if owner not in self.version:
            return {}
        record = self._load(owner)
        self._remember(owner, record)
        return record

    def write(self, records: Mapping[Any, Record], round: int) -> None:
        """A finished round's records, all at once."""
        for owner, record in records.items():
            if not record:
                continue
            record = self.read(owner) | record  # what this round did not touch stays
            self.version[owner] = round
            self._unsaved.add(owner)
            self._remember(owner, record)

    def commit(self) -> dict[str, int]:
        """Puts everything on disk; the index to be stored with the checkpoint."""
        if self._unsaved:
            self._save(*sorted(self._unsaved, key=str))
        if self.folder.is_dir():
            disk.sync(self.folder)
        self.committed = [*self.committed, dict(self.version)][-2:]
        return {str(o): self.version[o] for o in sorted(self.version, key=str)}

    def digests(self) -> dict[str, str]:
        """The SHA-256 of every file that the index names."""
        return {name: self.records[name] for o in sorted(self.version, key=str) if (name := self._path(o).name) in self.records}

    def clean(self, *older: str) -> None:
        """Removes files that neither the committed index names nor an older checkpoint needs."""
        named = {self._path(o).name for o in self.version}
        self.records = {name: digest for name, digest in self.records.items() if name in named}
        disk.clean(self.folder, OURS, named.union(older))

    def restore(self, index: dict[str, int], records: Mapping[str, str] | None = None, older: Iterable[str] = ()) -> None:
        self.version, self.records = {int(o) if o.isdecimal() else o: v for o, v in index.items()}, dict(records or {})
        self.committed = [dict(self.version)]
        self._memory.clear()
        self._unsaved.clear()
        self._bytes = 0
        self.clean(*older)

    def _path(self, owner: Owner) -> Path:
        return self.folder / f"{owner}-{self.version[owner]}.safetensors"

    def _remember(self, owner: Owner, record: Record) -> None:
        if owner in self._memory:
            self._bytes -= size(self._memory.pop(owner))
        self._memory[owner] = record
        self._bytes += size(record)
        while self._bytes > self.budget and len(self._memory) > 1:
            oldest = next(iter(self._memory))
            if oldest in self._unsaved:
                self._save(oldest)
            self._bytes -= size(self._memory.pop(oldest))

    def _save(self, *owners: Owner) -> None:
        if not self.folder.is_dir():
            with disk.errors_as_user_errors(self._path(owners[0])):
                self.folder.mkdir(parents=True, exist_ok=True)
            disk.sync(self.folder.parent)
        with disk.beside() as thread:
            for owner in owners:
                path = self._path(owner)
                shape, tensors = pack(self._memory[owner], self.layouts)
                data = save(apart(tensors), {"shape": json.dumps(shape)})
                self.records[path.name] = disk.write_noting(path, data, thread)
                self._unsaved.discard(owner)

    def _load(self, owner: Owner) -> Record:
        path, remedy = self._path(owner), "restore the file, or start the run again"
        try:
            data = disk.read(path, remedy)
        except UserError:
            raise UserError(f"what {_said(owner)} cannot be read from {path}", remedy) from None
        try:
            if path.name in self.records and disk.sha256(data) != self.records[path.name]:
                raise UserError(f"what {_said(owner)} is damaged ({path})", remedy)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            return unpack(json.loads(header["__metadata__"]["shape"]), load(data), self.layouts, self.device)
        except (SafetensorError, KeyError, ValueError) as e:
            raise UserError(f"what {_said(owner)} cannot be read from {path} ({type(e).__name__})", remedy) from None


def _said(owner: Owner) -> str:
    """For a sentence."""
    return f"client {owner} keeps" if isinstance(owner, int) else f"the server has of client {owner.partition('-')[2]}"
