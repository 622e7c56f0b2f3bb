"""What the benches share: the machine they ran on, a table on the terminal, a JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def machine(device: str | None = None) -> dict[str, Any]:
    from fallow.runs.at_work import commit  # not at the top: bench.peers also runs where only a peer is installed

    on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_cuda else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "commit": commit(),
    }


def table(title: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as they must be; numbers are given as text already."""
    cells = [[str(c) for c in row] for row in [title, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(title))]
    return "\n".join("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in cells)


def write(path: Path | None, results: Any, **more: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(machine() | more | {"results": results}, indent=1) + "\n")
