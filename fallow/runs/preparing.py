"""What a run needs before it begins: settings, data and federation, complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fallow.config import Config
from fallow.data.federate import Federation, Spec, federate
from fallow.data.sharing import federate_with_shared
from fallow.data.sources import Source
from fallow.data.validation import hold_out
from fallow.engine.kit import Declared, Kit
from fallow.methods.base import Method
from fallow.recipes.reading import recipe
from fallow.runs import automatic
from fallow.runs.data import Reading, completed, named, opened_source, sized
from fallow.runs.settings import are_fitted, resolve

RecipeName = str | Mapping[str, Any] | None  # or a recipe's keys themselves
FEDERATION = {"data", *Spec.__dataclass_fields__} - {"seed"}
Watcher = Callable[[str, Any], None]  # called with ("start", run), ("round", row), ("warning", finding), ("end", summary)


def make_federation(options: Config, source: Source) -> Federation:
    spec = Spec(**{f: getattr(options, f) for f in Spec.__dataclass_fields__} | {"seed": options.seed_of("split")})
    labels = source.train.labels.numpy()
    data = labels, len(source.classes), spec
    if beta := getattr(options, "share_beta", 0.0):
        federation = federate_with_shared(*data, beta, getattr(options, "share_alpha", 1.0), source.train.clients)
    else:
        federation = federate(*data, source.train.clients)
    return hold_out(federation, labels, options.validation, spec.seed) if options.validation else federation


def base_of(recipe_name: RecipeName, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe; without one, and without a word on data and federation, those of the newcomer's run."""
    if isinstance(recipe_name, Mapping):
        return dict(recipe_name)
    plain = recipe_name is None and not FEDERATION & set(given)
    return recipe(recipe_name or "default") if recipe_name or plain else {}


def prepare(
    recipe_name: RecipeName, given: dict[str, Any], source: Source | None = None, download: bool = False, trust: bool = False,
    watch: Watcher | None = None,
) -> tuple[type[Method], Config, Source, Federation]:  # fmt: skip
    """Settings, data and federation of a run, complete, without running it; images are decoded when all else has been checked."""
    given = dict(given)
    if isinstance(given.get("data"), Source):
        source = given.pop("data")
    if source is not None:
        given.setdefault("data", source.name)
    base = base_of(recipe_name, given)
    fit = are_fitted(base, given)
    method, options = resolve(base, given, trust)
    options = options if source else named(options)
    options, told = sized(options, download) if fit and source is None else (options, [])
    opened = opened_source(options, source, download)
    complete, federation = _settled(method, options, fit, opened)
    reading = Reading(watch, complete, opened, told)
    if opened.later is None:
        return method, complete, opened, federation
    Kit(complete, method(complete, len(opened.classes)), Declared.of(complete, opened, federation)).initial()  # complains now, not after the decoding
    source = reading.whole(options)
    complete, federation = _settled(method, options, fit, source)
    return method, complete, source, federation


def _settled(method: type[Method], options: Config, fit: bool, source: Source) -> tuple[Config, Federation]:
    """The settings with what the data says, and the federation that they make."""
    said = automatic.given(options)
    options = completed(method, options, source)
    federation = make_federation(options, source)
    if fit:
        options = automatic.fitted(method, options, said, source, federation)
    return options, federation
