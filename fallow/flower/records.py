"""What a node keeps between rounds, on its own disk: a record for each round that may still be asked for.

A record counts once the server says so: each message names the round whose update of this client it used last, and the
node starts from the record of that round. So a repeated or late round harms nothing, and a server that went back to
its checkpoint finds what it expects.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fallow import disk
from fallow.engine.pack import apart, pack, unpack
from fallow.errors import UserError
from fallow.methods.state import Layout

Record = dict[str, Any]


class Records:
    """Files `ROUND-CHECKSUM.safetensors` in a folder of one run's and one client's own."""

    def __init__(self, folder: Path, layouts: Mapping[str, Layout], device: Any):
        self.folder, self.layouts, self.device = folder, dict(layouts), device

    def read(self, round: int) -> Record:
        """What was kept after a round (from 1); 0 is before the first, when nothing is kept."""
        if not round:
            return {}
        path = self._find(round)
        if path is None:
            raise UserError(f"this node no longer has what its client kept after round {round}", f"put {self.folder} back, or start the run anew")
        data = disk.read(path, "restore the file, or start the run anew")
        try:
            if path.name != _name(round, data):
                raise ValueError("checksum")
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            return unpack(json.loads(header["__metadata__"]["shape"]), load(data), self.layouts, self.device)
        except (SafetensorError, KeyError, ValueError):
            raise UserError(f"what the client kept after round {round} is damaged ({path})", "restore the file, or start the run anew") from None

    def write(self, record: Record, round: int, needed: Collection[int]) -> None:
        """Puts a round's record on the disk, whole or not at all; of the others the needed ones stay, and later ones, which are not this one's to judge."""
        with disk.errors_as_user_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        shape, tensors = pack(record, self.layouts)
        data = save(apart(tensors), {"shape": json.dumps(shape)})
        name = _name(round, data)
        disk.write(self.folder / name, data)
        disk.sync(self.folder)
        for path in self.folder.iterdir():
            if path.name != name and _round(path) <= round and _round(path) not in needed:
                disk.remove(path)

    def rounds(self) -> list[int]:
        return sorted(_round(p) for p in self.folder.glob("[0-9]*-*.safetensors")) if self.folder.is_dir() else []

    def _find(self, round: int) -> Path | None:
        return next(iter(sorted(self.folder.glob(f"{round}-*.safetensors"))), None) if self.folder.is_dir() else None


def _round(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def _name(round: int, data: bytes) -> str:
    return f"{round}-{disk.sha256(data)[:16]}.safetensors"
