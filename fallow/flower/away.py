"""A federation whose clients are elsewhere: of each only is known how many samples it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fallow.data.dealing import EMPTY, Ints
from fallow.data.federate import labels_sha256
from fallow.data.holdings import Federation, Holding


class Away(Federation):
    """The clients' rows are placeholders: nothing lies there."""

    @staticmethod
    def made(server: Holding, counts: Sequence[Mapping[str, int]], labels: Ints, about: Mapping[str, Any]) -> Away:
        clients = tuple(Holding(np.zeros(c["labelled"], np.int64), np.zeros(c["unlabelled"], np.int64)) for c in counts)
        spec = dict(about) | {"partition": "nodes", "clients": len(clients), "samples": len(labels), "labels_sha256": labels_sha256(labels)}
        return Away(server, clients, EMPTY, tuple(str(k) for k in range(len(clients))), spec)

    @staticmethod
    def load(path: Path | str) -> Away:
        f = Federation.load(path)
        return Away(f.server, f.clients, f.dropped, f.names, f.spec, f.tries)

    def counts(self, labels: Ints, classes: int) -> dict[str, Ints]:
        """Nobody tells the server what classes his samples have."""
        return {side: np.zeros((len(self.clients), classes), np.int64) for side in ("labelled", "unlabelled")}
