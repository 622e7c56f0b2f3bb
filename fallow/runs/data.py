"""A run's data: read as its settings say, and what they leave to the data to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fallow import config as configuration
from fallow.config import Config
from fallow.data import sources
from fallow.data.natural import SERVER, given, without_small
from fallow.data.partitions import parse
from fallow.data.readers.albums import NOBODY
from fallow.data.readers.images import Tell, silent
from fallow.data.sources import Source
from fallow.errors import UserError
from fallow.machine import device_of
from fallow.methods.base import Method

LARGEST, USUAL = 96, 64  # pixels a side: of squares that are left as they are; what other photographs are brought to
ON_CPU = 32  # at most, of all of them: with 64 a run takes two to three times as long


def named(options: Config) -> Config:
    """The settings with `data` in full: `folder:photos` where only `photos` was given."""
    return options.model_copy(update={"data": sources.in_full(options.data)})


def sized(options: Config, download: bool = False) -> tuple[Config, list[str]]:
    """Settings under which one's own photographs are squares of a size that trains, where nobody said what size; and a word of it."""
    if not options.data.startswith(("folder:", "csv:")) or "size" in options.image.model_fields_set:
        return options, []
    found = sources.opened(options.data, options.data_dir, download, channels=options.image.channels, layout=options.layout, skip_bad=options.skip_bad)
    height, width = found.train.images.shape[2:]
    square = height == width <= LARGEST
    most = min(height, width) if square else min(USUAL, height, width)
    size = min(ON_CPU, most) if device_of(options.device).type == "cpu" else most
    if square and size == most:
        return options, []
    fit = options.image.fit if "fit" in options.image.model_fields_set else "crop"
    image = options.image.model_copy(update={"size": size, "fit": fit})
    told = f"the most common size is {width} wide and {height} high; {'on a CPU ' if size < most else ''}all are brought to {size}x{size} (image.size={size} image.fit={fit})"
    if size < most:
        told += f"; image.size={most} keeps more and takes longer"
    return options.model_copy(update={"image": image}), [told]


def opened_source(options: Config, source: Source | None = None, download: bool = False) -> Source:
    """The data as the settings want it; of one's own image files only the headers are read."""
    image = options.image
    source = source or sources.opened(
        options.data, options.data_dir, download,
        size=image.size, fit=image.fit, channels=image.channels, layout=options.layout, skip_bad=options.skip_bad,
    )  # fmt: skip
    source = source if source.later else sources.fit(source, size=image.size, fit=image.fit, channels=image.channels)
    height, width = source.train.images.shape[2:]
    if height != width:
        raise UserError(f"the images of {source.name} are {height}x{width}, not square", "set image.size, with image.fit=crop, resize or pad")
    return source


def load_source(options: Config, source: Source | None = None, download: bool = False, tell: Tell = silent) -> Source:
    return read(options, opened_source(options, source, download), tell)


def read(options: Config, source: Source, tell: Tell = silent) -> Source:
    """The opened source with its images."""
    image = options.image
    return sources.fit(source.whole(tell), size=image.size, fit=image.fit, channels=image.channels)


class Reading:
    """Tells a watcher what the data is, and how far its images are decoded."""

    def __init__(self, watch: Callable[[str, Any], None] | None, options: Config, opened: Source, more: Sequence[str] = ()):
        self.watch, self.opened = watch or (lambda *_: None), opened
        self.said = [*sentences(options, opened), *more]
        self._tell(self.said)

    def whole(self, options: Config) -> Source:
        source = read(options, self.opened, lambda done, count: self.watch("reading", (done, count)))
        self._tell([sentence for sentence in source.said if not any(known.startswith(sentence) for known in self.said)])
        return source

    def _tell(self, said: list[str]) -> None:
        for sentence in said:
            self.watch("data", sentence)


def natural_clients(source: Source) -> set[str]:
    """Who the data says holds its images, the server aside."""
    return set(source.train.clients or ()) - {SERVER, NOBODY}


def completed(method: type[Method], options: Config, source: Source) -> Config:
    """Fills in what only the data can tell: who its clients are, how many labels by default."""
    changes: dict[str, Any] = {}
    said, there = options.model_fields_set, natural_clients(source)
    if there and not said & {"partition", "unlabelled_partition"}:
        if "clients" in said and options.clients != len(there):
            cause = f"clients={options.clients}, but the data of {source.name} lies at {len(there)} sites"
            raise UserError(cause, "leave clients out, or mix the sites with partition=iid")
        changes["partition"] = "natural"
    partition = parse(changes.get("partition", options.partition))
    if partition.name == "natural" and source.train.clients is not None:
        clients = given(source.train.clients, len(source.train), partition.options)
        changes["clients"] = len(without_small(clients, source.train.labels.numpy(), partition.options).names)
    counted = (options.label_count, options.label_ratio, options.label_per_class)
    known = bool((source.train.labels >= 0).all())  # where some labels are missing, the others are all used
    if options.labels != "all" and all(c is None for c in counted) and known:
        changes["label_ratio"] = 0.05
    if not changes:
        return options
    return configuration.validate(method.Options, options.model_dump() | changes)


def sentences(options: Config, source: Source) -> list[str]:
    """What is to be said of the data: how its files were understood, and who its clients are."""
    said = list(source.said)
    if natural_clients(source):
        natural = parse(options.partition).name == "natural"
        said.append(f"each of these is a client (partition={options.partition})" if natural else f"they are mixed, clients are made by partition={options.partition}")
    return ["; ".join([said[0], said.pop()]), *said[1:]] if len(said) > 1 and natural_clients(source) else said
