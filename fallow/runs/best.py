"""The best round by validation: its weights in the run's folder, from one checkpoint to the next."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fallow import disk
from fallow.engine.evaluating import Best
from fallow.methods.state import State
from fallow.runs.manifest import sha256

FOLDER, RESULT = "best", "best.safetensors"
OURS = re.compile(r"\d+\.safetensors|\..*\.part")  # what is called otherwise was put there by others


def encoded(state: State) -> bytes:
    """A model as safetensors, the same bytes for the same weights."""
    return save({name: t.detach().cpu().contiguous() for name, t in state.tensors().items()})


class BestFiles:
    """`best/ROUND.safetensors`, a file for each round that one of the last checkpoints calls the best."""

    def __init__(self, run: Path):
        self.run, self.folder = run, run / FOLDER
        self._digests: dict[str, str] = {}

    def write(self, best: Best | None) -> dict[str, str]:
        """Makes sure that the weights lie there, and lets go of them; their file and its SHA-256."""
        if best is None:
            return {}
        name = f"{FOLDER}/{best.round}.safetensors"
        if best.state is not None:
            if not self.folder.is_dir():
                with disk.errors_as_user_errors(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                disk.sync(self.run)
            data = encoded(best.state)
            disk.write(self.run / name, data)
            disk.sync(self.folder)
            self._digests[name], best.state = sha256(data), None
        return {name: self._digests[name]}

    def restore(self, index: dict[str, Any]) -> Best | None:
        """What a checkpoint says was the best round until then."""
        if not index.get("best"):
            return None
        self._digests |= {name: digest for name, digest in index["files"].items() if Path(name).parent.name == FOLDER}
        return Best(**index["best"], state=None)

    def read(self, best: Best) -> bytes:
        return disk.read(self.folder / f"{best.round}.safetensors")

    def clean(self, needed: Iterable[str]) -> None:
        """Removes what no checkpoint names."""
        disk.clean(self.folder, OURS, {Path(name).name for name in needed})
