"""metrics.jsonl, a row a round: written line by line, read back as far as it is whole; and JSON as run folders have it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.engine.finite import defined
from fallow.errors import UserError
from fallow.runs.manifest import Manifest, damaged, sha256

Row = dict[str, Any]
LARGEST = sys.float_info.max
# what a summary must have to be read
SUMMARY: dict[str, Any] = {
    "status": str, "last": int | float | None, "best": int | float | None, "best_round": int | None, "rounds": int,
    "seconds": int | float, "seconds_per_round": int | float, "seed": int, "method": str, "data": str, "classes": int,
    "channels": int, "size": int, "fingerprint": str, "config_hash": str, "versions": dict,
}  # fmt: skip


class MetricsFile:
    def __init__(self, path: Path):
        self.path = path
        self._digest, self._bytes = hashlib.sha256(), 0  # of the file as this process wrote it

    def covered(self) -> Manifest:
        """What a manifest says of the rows until now."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def rows(self, noted: Manifest | None) -> list[Row]:
        if not self.path.exists():
            return []
        data = disk.read(self.path, "restore the file, or start the run again")
        if noted is not None:
            self.check(noted, data)
        return [row for _, row in self._lines(data)]

    def _lines(self, data: bytes) -> Iterator[tuple[bytes, Row]]:
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                yield line, json.loads(line)
            except (ValueError, RecursionError):
                if number == len(lines) and not line.endswith(b"\n"):  # a line cut off by a kill
                    return
                raise UserError(f"line {number} of {self.path} is damaged", "restore the file, or start the run again") from None

    def append(self, row: Row) -> None:
        line = written(row).encode()
        with disk.errors_as_user_errors(self.path), open(self.path, "ab") as f:
            f.write(line)
        self._digest.update(line)
        self._bytes += len(line)

    def cut(self, rounds: int) -> None:
        data = disk.read(self.path) if self.path.exists() else b""
        self.leave(b"".join(line for line, row in self._lines(data) if row["round"] <= rounds) if rounds else b"")

    def leave(self, metrics: bytes) -> None:
        """Makes these the metrics."""
        if not self.path.exists() or disk.read(self.path) != metrics:
            disk.write(self.path, metrics)
        self._digest, self._bytes = hashlib.sha256(metrics), len(metrics)

    def check(self, noted: Manifest, data: bytes) -> None:
        """The first rows must be those of which the checksum is known; those behind them are news."""
        covered = noted.get("metrics")
        if covered and (len(data) < covered["bytes"] or sha256(data[: covered["bytes"]]) != covered["sha256"]):
            raise damaged(self.path)


def is_summary(tree: Any) -> bool:
    return isinstance(tree, dict) and all(name in tree and _is(tree[name], kind) for name, kind in SUMMARY.items())


def _is(value: Any, kind: Any) -> bool:
    """A number is one that a float can hold."""
    number = isinstance(value, int | float)
    return isinstance(value, kind) and not (number and (isinstance(value, bool) or not -LARGEST <= value <= LARGEST))


def laid_out(tree: dict[str, Any], depth: int = 3, indent: str = " ") -> str:
    """JSON with a line for each key, of so many levels, and lists on one line."""
    inner = lambda v: laid_out(v, depth - 1, indent + " ") if isinstance(v, dict) and v and depth > 1 else json.dumps(v, allow_nan=False)
    lines = ",\n".join(f"{indent}{json.dumps(str(name))}: {inner(value)}" for name, value in tree.items())
    return f"{{\n{lines}\n{indent[1:]}}}"


def written(row: Row) -> str:
    """A row as a line of metrics.jsonl."""
    try:
        text = json.dumps(row, allow_nan=False)
    except ValueError:  # JSON has no word for what is no finite number
        text = json.dumps(defined(row), allow_nan=False)
    return text + "\n"
