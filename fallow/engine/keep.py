"""What clients keep between their rounds: records in memory up to a budget, beyond that in files.

A record's file carries the round that wrote it, so new versions stand beside old ones until a checkpoint commits the
index; what neither it nor the checkpoint before it names is never read and is removed. A record is read with the checksum
it was written with. Clients that never took part cost nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fallow import disk
from fallow.engine.pack import pack, size, unpack
from fallow.errors import UserError
from fallow.methods.state import Layout

Record = dict[str, Any]


class Keep:
    def __init__(self, folder: Path, budget: float, layouts: dict[str, Layout], device: torch.device):
        self.folder, self.budget, self.layouts, self.device = folder, budget, layouts, device
        self.version: dict[int, int] = {}  # client -> round that wrote its record
        self.committed: list[dict[int, int]] = []  # the versions at the last two commits: what a checkpoint may go back to
        self.records: dict[str, str] = {}  # SHA-256 of the files, by name; older versions among them until `clean`
        self._memory: OrderedDict[int, Record] = OrderedDict()
        self._bytes = 0
        self._unsaved: set[int] = set()

    def read(self, client: int) -> Record:
        if client in self._memory:
            self._memory.move_to_end(client)
            return self._memory[client]
        if client not in self.version:
            return {}
        record = self._load(client)
        self._remember(client, record)
        return record

    def write(self, records: dict[int, Record], round: int) -> None:
        """A finished round's records, all at once."""
        for client, record in records.items():
            if not record:
                continue
            record = self.read(client) | record  # what this round did not touch stays
            self.version[client] = round
            self._unsaved.add(client)
            self._remember(client, record)

    def commit(self) -> dict[str, int]:
        """Puts everything on disk; the index to be stored with the checkpoint."""
        for client in sorted(self._unsaved):
            self._save(client)
        if self.folder.is_dir():
            disk.sync(self.folder)
        self.committed = [*self.committed, dict(self.version)][-2:]
        return {str(c): v for c, v in sorted(self.version.items())}

    def digests(self) -> dict[str, str]:
        """The SHA-256 of every file that the index names."""
        return {name: self.records[name] for c in sorted(self.version) if (name := self._path(c).name) in self.records}

    def clean(self, *older: str) -> None:
        """Removes files that neither the committed index names nor an older checkpoint needs."""
        named = {self._path(c).name for c in self.version}
        self.records = {name: digest for name, digest in self.records.items() if name in named}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name not in named and path.name not in older:
                    disk.remove(path)

    def restore(self, index: dict[str, int], records: Mapping[str, str] | None = None, older: Iterable[str] = ()) -> None:
        self.version, self.records = {int(c): v for c, v in index.items()}, dict(records or {})
        self.committed = [dict(self.version)]
        self._memory.clear()
        self._unsaved.clear()
        self._bytes = 0
        self.clean(*older)

    def _path(self, client: int) -> Path:
        return self.folder / f"{client}-{self.version[client]}.safetensors"

    def _remember(self, client: int, record: Record) -> None:
        if client in self._memory:
            self._bytes -= size(self._memory.pop(client))
        self._memory[client] = record
        self._bytes += size(record)
        while self._bytes > self.budget and len(self._memory) > 1:
            oldest = next(iter(self._memory))
            if oldest in self._unsaved:
                self._save(oldest)
            self._bytes -= size(self._memory.pop(oldest))

    def _save(self, client: int) -> None:
        path = self._path(client)
        if not self.folder.is_dir():
            with disk.told(path):
                self.folder.mkdir(parents=True, exist_ok=True)
            disk.sync(self.folder.parent)
        shape, tensors = pack(self._memory[client], self.layouts)
        data = save({k: t.cpu().contiguous() for k, t in tensors.items()}, {"shape": json.dumps(shape)})
        self.records[path.name] = disk.write_noting(path, data)
        self._unsaved.discard(client)

    def _load(self, client: int) -> Record:
        path, remedy = self._path(client), "restore the file, or start the run again"
        try:
            data = disk.read(path, remedy)
        except UserError:
            raise UserError(f"what client {client} keeps cannot be read from {path}", remedy) from None
        try:
            if path.name in self.records and disk.sha256(data) != self.records[path.name]:
                raise UserError(f"what client {client} keeps is damaged ({path})", remedy)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            return unpack(json.loads(header["__metadata__"]["shape"]), load(data), self.layouts, self.device)
        except (SafetensorError, KeyError, ValueError) as e:
            raise UserError(f"what client {client} keeps cannot be read from {path} ({type(e).__name__})", remedy) from None
