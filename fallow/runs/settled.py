"""Complete settings of runs that are still to be made, which the data have a say in; each data set is read once."""

from __future__ import annotations

from typing import Any

from fallow import runs
from fallow.config import Config
from fallow.data.sources import Source
from fallow.runs.settings import Keys, resolve


class Settled:
    """Settings with what only the data can tell."""

    def __init__(self, download: bool):
        self.download = download
        self.read: dict[tuple[Any, ...], Source] = {}

    def of(self, options: Config) -> Source:
        key = (options.data, options.data_dir, options.image)
        if key not in self.read:
            self.read[key] = runs.load_source(options, None, self.download)
        return self.read[key]

    def settings(self, base: str | Keys | None, keys: Keys, trust: bool) -> Config:
        """The complete settings of a run."""
        source = self.of(resolve(runs.base_of(base, keys), keys, trust)[1])
        return runs.prepare(base, keys, source, trust=trust)[1]
