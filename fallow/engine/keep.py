"""What clients keep between their rounds: records in memory up to a budget, beyond that in files.

A record's file carries the round that wrote it, so new versions stand beside old ones until a checkpoint commits the
index; what the index does not name is never read and is removed. Clients that never took part cost nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fallow import disk
from fallow.engine.pack import pack, size, unpack
from fallow.errors import UserError
from fallow.methods.state import Layout

Record = dict[str, Any]


class Keep:
    def __init__(self, folder: Path, budget: float, layouts: dict[str, Layout], device: torch.device):
        self.folder, self.budget, self.layouts, self.device = folder, budget, layouts, device
        self.version: dict[int, int] = {}  # client -> round that wrote its record
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
        return {str(c): v for c, v in sorted(self.version.items())}

    def clean(self) -> None:
        """Removes files that the committed index does not name."""
        named = {self._path(c).name for c in self.version}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name not in named:
                    path.unlink(missing_ok=True)

    def restore(self, index: dict[str, int]) -> None:
        self.version = {int(c): v for c, v in index.items()}
        self._memory.clear()
        self._unsaved.clear()
        self._bytes = 0
        self.clean()

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
        with disk.told(path):
            self.folder.mkdir(parents=True, exist_ok=True)
        shape, tensors = pack(self._memory[client], self.layouts)
        disk.write(path, save({k: t.cpu().contiguous() for k, t in tensors.items()}, {"shape": json.dumps(shape)}))
        self._unsaved.discard(client)

    def _load(self, client: int) -> Record:
        path = self._path(client)
        try:
            with safe_open(path, "pt") as f:
                shape = json.loads(f.metadata()["shape"])
                return unpack(shape, {k: f.get_tensor(k) for k in f.keys()}, self.layouts, self.device)  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as e:
            raise UserError(
                f"what client {client} keeps cannot be read from {path} ({type(e).__name__})",
                "restore the file, or start the run again",
            ) from None
