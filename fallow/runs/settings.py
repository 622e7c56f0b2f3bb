"""From a recipe and key=value to one complete, typed setting.

The later wins: default, method, reading, recipe, its row, its cell, command line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fallow import models, own
from fallow.config import VERSION, Config, validate
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods import combining, find, is_own
from fallow.methods.base import Method
from fallow.recipes.grid import GRID, Grid
from fallow.runs import lacking
from fallow.runs.origin import located, own_code, started_in
from fallow.trees import merge, read_yaml, shown

DEFAULTS = ("fitted", "paper")  # what a key gets that nobody gave: what suits the data, or the method's paper
MEASURING = {"measure", "measure_every", "diversity_scale", "diversity_scope", "diversity_norms"}
KERNELS = ("compile", "fused")  # other ones than usual round otherwise
NEWER = {  # keys that older runs have not; as given here they change nothing
    "layout": "auto", "skip_bad": False, "validation": None, "weight_ema": 0.0, "warmup_rounds": 0, "labelled_pick": "random",
    "first_weights": "model", "label_time": "round", "consistency_stats": "update", "evaluate": "anchor",
}  # fmt: skip
UNHASHED = {"data_dir", "device", "slots", "backend", "capture", *KERNELS, "keep_memory", "view_memory", "checkpoint_every", "track", "rank_timeout"} | MEASURING
EDITABLE = UNHASHED - MEASURING - set(KERNELS)  # in a run's folder, by hand, without another result


def without(keys: Mapping[str, Any], others: Mapping[str, Any]) -> Keys:
    """Keys that others do not have; sections key by key."""
    out: Keys = {}
    for name, value in keys.items():
        if name not in others:
            out[name] = value
        elif isinstance(value, Mapping) and isinstance(others[name], Mapping):
            out[name] = without(value, others[name])
    return out


def resolve(recipe_keys: Keys, given: Keys, trust: bool = False) -> tuple[type[Method], Config]:
    """The method and its settings. A recipe never sets a key that a reading of its method sets.

    Code that is given is the user's word; code that the recipe names is run only if he `trust`s it.

    `readings` in a recipe (reading -> keys) adds to the method's, where a data set has its own.
    """
    recipe_keys, given = dict(recipe_keys), {k: v for k, v in given.items() if k != "defaults"}
    said = {given.get("method"), given.get("model")} - {None} if _plain(given) else set()
    if grid := Grid.of(recipe_keys):
        recipe_keys, given = grid.chosen(given)
    recipe_keys = {k: v for k, v in recipe_keys.items() if k not in GRID}
    name = given.get("method", recipe_keys.get("method", Config.model_fields["method"].default))
    if not isinstance(name, str):
        own_class = isinstance(name, type)
        remedy = f"save it in a file and write method='FILE.py:{name.__name__}'" if own_class else "write for example method=fixmatch"
        raise UserError(f"method={shown(name)} is no name", remedy)
    if is_own(name):
        own.named(name, "method") if name in said else own.check(name, "method", "the recipe", trust)
    method = find(name)
    recipe_keys = without_foreign(recipe_keys, given, method)
    labels = given.get("labels", recipe_keys.get("labels", Config.model_fields["labels"].default))
    reading = given.get("reading", recipe_keys.get("reading", "recommended"))
    more = recipe_keys.pop("readings", None) or {}
    read = merge(method.readings.get(reading, {}), more.get(reading) or {}) if isinstance(reading, str) else {}
    recipe_keys = without(recipe_keys, read)
    scenario = method.scenario_defaults(shown(labels))
    defaults = merge(scenario, read)
    lacking.check(recipe_keys | given, method, name)
    options = validate(method.Options, merge(defaults, recipe_keys, _with_counts(given, recipe_keys)))
    _unsay(options, scenario, [read, recipe_keys, given])
    if options.labels not in method.scenarios:
        able = ", ".join(sorted(method.scenarios))
        raise UserError(f"method {name} is not defined for labels={options.labels}", f"it works with labels={able}")
    if models.is_own(options.model):
        from_recipe = options.model not in said and options.model in (recipe_keys.get("model"), read.get("model"), *_said(more))
        own.check(options.model, "model", "the recipe", trust) if from_recipe else own.named(options.model, "model")
    combining.check(method, options)
    return method.algorithm(options), options


def _unsay(options: BaseModel, defaults: Mapping[str, Any], said: Sequence[Mapping[str, Any]]) -> None:
    """Marks what came from the defaults alone as set by nobody, sections key by key."""
    for name, value in defaults.items():
        words = [keys[name] for keys in said if name in keys]
        if not words:
            options.model_fields_set.discard(name)
        elif isinstance(value, Mapping) and all(isinstance(word, Mapping) for word in words):
            _unsay(getattr(options, name), value, words)


def without_foreign(recipe_keys: Keys, given: Keys, method: type[Method]) -> Keys:
    """A recipe's keys; under another method than its own without those that only its own has."""
    if given.get("method") in (None, recipe_keys.get("method")):
        return recipe_keys
    foreign = lacking.lacking(recipe_keys, method)
    return {k: v for k, v in recipe_keys.items() if k not in foreign}


def are_fitted(recipe_keys: Keys, given: Keys) -> bool:
    """Whether keys that nobody gave are fitted to the data; `defaults` says so, and the recipes of papers say otherwise."""
    word = given.get("defaults", recipe_keys.get("defaults", DEFAULTS[0]))
    if word not in DEFAULTS:
        raise UserError(f"defaults={shown(word)} is not known", f"give one of {', '.join(DEFAULTS)}")
    return bool(word == DEFAULTS[0])


def _with_counts(given: Keys, recipe_keys: Keys) -> Keys:
    """A way of counting labels, or of measuring local work, that is given replaces the recipe's."""
    for group in (("label_count", "label_ratio", "label_per_class"), ("steps", "epochs")):
        if any(given.get(k) is not None for k in group):
            for other in group:
                recipe_keys.pop(other, None)
    given = dict(given)
    for keys in (given, recipe_keys):  # one measure of local work puts aside a method's default in the other
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if keys.get(one) is not None:
                keys.setdefault(other, None)
    return given


def _plain(given: Keys) -> bool:
    return all(isinstance(given.get(k), str | None) for k in ("method", "model"))


def _said(readings: Any) -> list[Any]:
    """The models that a recipe's readings name."""
    return [v.get("model") for v in readings.values() if isinstance(v, Mapping)] if isinstance(readings, Mapping) else []


class Stated(Config):
    """Settings of a method whose code is not looked at: its own keys are there as they were written."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=(), validate_default=False)


def stated(path: Path) -> Config:
    """The settings of a run folder, without running code that it names."""
    keys = _stored_keys(path)
    if not is_own(str(keys.get("method"))):
        return validate(find(str(keys.get("method"))).Options, keys)
    common = validate(Config, {k: v for k, v in keys.items() if k in Config.model_fields})
    return Stated.model_construct(**{k: getattr(common, k) for k in Config.model_fields}, **{k: v for k, v in keys.items() if k not in Config.model_fields})


def stored(path: Path, trust: bool = False) -> tuple[type[Method], Config]:
    """The method and settings of a run folder; code that it names is run only if it is the user's, or he trusts it."""
    keys, o = _stored_keys(path), stated(path)
    start = started_in(path.parent)
    for what, name in own_code(located(o, start) if start else o).items():
        own.check(name, what, f"the run {path.parent}", trust)
    method = find((located(o, start) if start else o).method)
    options = validate(method.Options, keys)
    return method.algorithm(options), options


def _stored_keys(path: Path) -> Keys:
    keys = read_yaml(path)
    version = keys.pop("version", None)
    if version != VERSION:
        raise UserError(
            f"{path} was written by another version of Fallow (config version {version}, this one reads {VERSION})",
            "continue the run with the version that began it, or start it again",
        )
    return keys


def config_hash(options: Config) -> str:
    """Equal for runs that must give equal results on one kind of device."""
    usual = {k: type(options).model_fields[k].default for k in KERNELS}
    told = {k: v for k, v in options.model_dump(mode="json").items() if NEWER.get(k, ...) != v}
    keys = {k: v for k, v in told.items() if k not in UNHASHED or v != usual.get(k, v)}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]


def _worded(tree: Any) -> bool:
    """Whether all keys are text, also of what is inside."""
    if isinstance(tree, Mapping):
        return all(isinstance(k, str) for k in tree) and all(map(_worded, tree.values()))
    return all(map(_worded, tree)) if isinstance(tree, list) else True


def settings_sha256(path: Path) -> str:
    """Of the keys in a config.yaml, but for those that may be edited there."""
    keys = {k: v for k, v in read_yaml(path).items() if k not in EDITABLE}
    if not _worded(keys):
        raise UserError(f"{path} has a key that is no word", "restore the file")
    return keys_sha256(keys)


def keys_sha256(stored_keys: Keys) -> str:
    """Of such keys."""
    keys = {k: v for k, v in stored_keys.items() if k not in EDITABLE}
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()


def differences(stored: Keys, expected: Keys) -> Keys:
    """Settings of a run that are not the expected ones and change results, as key -> value."""
    from_data = (
        {"clients"}
        if expected.get("partition") == "natural"
        else {"label_ratio"}
        if expected.get("label_ratio") is None
        else set()
    )
    return {
        k: stored[k] for k, v in expected.items() if k in stored and k not in UNHASHED | from_data and stored[k] != v
    }
