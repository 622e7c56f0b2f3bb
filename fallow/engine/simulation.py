"""A federation in one process: all sites, and what no party may know: who holds what, hidden labels, the test set."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fallow.config import Config
from fallow.data.federate import Federation
from fallow.data.sources import Source
from fallow.engine.clients import SERVER
from fallow.engine.kit import Declared, Kit
from fallow.engine.memory import out_of_memory, too_little
from fallow.engine.site import Site, Sites
from fallow.methods.base import AnyMethod


class Simulation(Sites):
    """Its images lie on the device once; a site has rows of them."""

    def __init__(self, options: Config, method: AnyMethod, source: Source, federation: Federation, declared: Declared | None = None):
        """`declared`: of a federation whose clients are elsewhere, whose holdings are empty here."""
        self.kit = Kit(options, method, declared or Declared.of(options, source, federation))
        self.source, self.federation = source, federation
        self.labels: np.ndarray = source.train.labels.numpy()
        try:
            self.images, self.truth, self.test_images, self.test_labels = (
                t.to(self.kit.device) for part in (source.train, source.test) for t in (part.images, part.labels)
            )
        except RuntimeError as e:
            if not out_of_memory(e):
                raise
            size = (source.train.images.nbytes + source.test.images.nbytes) / 2**30
            raise too_little(f" already with the images, {size:.1f} GiB", "make them smaller (image.size)") from None

    def site(self, party: int) -> Site:
        holding = self.federation.server if party <= SERVER else self.federation.clients[party]
        return Site(self.kit, party, holding, self.images, self.labels, self.truth)

    def plain(self, rows: np.ndarray) -> Tensor:
        """Training images as they are tested."""
        return self.kit.plain(self.images.index_select(0, self.kit.put(rows)))

    def test_batch(self, start: int, stop: int) -> Tensor:
        return self.kit.plain(self.test_images[start:stop])
