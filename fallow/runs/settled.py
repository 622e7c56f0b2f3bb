"""Complete settings of runs that are still to be made, which the data have a say in; each data set is read once."""

from __future__ import annotations

from typing import Any

from fallow.config import Config
from fallow.data.sources import Source
from fallow.keys.section import Keys
from fallow.runs.data import load_source, named, sentences, sized
from fallow.runs.preparing import base_of, prepare
from fallow.runs.settings import are_fitted, resolve


class Settled:
    """Settings with what only the data can tell."""

    def __init__(self, download: bool):
        self.download = download
        self.read: dict[tuple[Any, ...], Source] = {}
        self.said: dict[str, None] = {}  # how the data were understood, each sentence once

    def of(self, options: Config) -> Source:
        key = (options.data, options.data_dir, options.image, options.layout, options.skip_bad)
        if key not in self.read:
            self.read[key] = load_source(options, None, self.download)
        return self.read[key]

    def settings(self, base: str | Keys | None, keys: Keys, trust: bool) -> Config:
        """The complete settings of a run."""
        recipe = base_of(base, keys)
        said = resolve(recipe, keys, trust)[1]
        options = named(said)
        told: list[str] = []
        if are_fitted(recipe, keys):
            options, told = sized(options, self.download)
        found: Keys = {} if options.data == said.data else {"data": options.data}  # as a run with these keys finds them
        if options.image != said.image:
            found["image"] = options.image.model_dump(exclude_unset=True)
        complete = prepare(recipe, keys | found, self.of(options), trust=trust)[1]
        self.said |= dict.fromkeys([*sentences(complete, self.of(options)), *told])
        return complete
