"""From a recipe and key=value to one complete, typed setting: default < method < reading < recipe < command line."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from fallow.config import VERSION, Config, merge, read_yaml, validate
from fallow.errors import UserError, suggest
from fallow.methods import find
from fallow.methods.base import Method

Keys = dict[str, Any]
UNHASHED = {"data_dir", "device", "slots", "capture", "compile", "keep_memory", "view_memory", "checkpoint_every"}


def recipes() -> dict[str, Path]:
    """The recipes by name, `paper/table1`."""
    root = Path(str(resources.files("fallow") / "recipes"))
    return {str(p.relative_to(root).with_suffix("")): p for p in sorted(root.rglob("*.yaml"))}


def recipe(name: str) -> Keys:
    """The keys of a recipe: a name, or a path to a YAML file. `inherit: OTHER` takes another one's keys first."""
    known = recipes()
    path = known.get(name) or (Path(name) if name.endswith((".yaml", ".yml")) else None)
    if path is None:
        raise UserError(f"there is no recipe {name!r}", suggest(name, known) + " (or give a path to a .yaml file)")
    keys = read_yaml(path)
    parent = keys.pop("inherit", None)
    keys.pop("about", None)
    return merge(recipe(parent), keys) if parent else keys


def resolve(recipe_keys: Keys, given: Keys) -> tuple[type[Method], Config]:
    """The method and its settings. A recipe never sets a key that a reading of its method sets."""
    recipe_keys, given = dict(recipe_keys), dict(given)
    name = given.get("method", recipe_keys.get("method", Config.model_fields["method"].default))
    if not isinstance(name, str):
        raise UserError(f"method={name!r} is no name", "write for example method=fixmatch")
    method = find(name)
    labels = given.get("labels", recipe_keys.get("labels", Config.model_fields["labels"].default))
    reading = given.get("reading", recipe_keys.get("reading", "recommended"))
    read = method.readings.get(reading, {}) if isinstance(reading, str) else {}
    recipe_keys = {k: v for k, v in recipe_keys.items() if k not in read}
    defaults = merge(method.scenario_defaults(str(labels)), read)
    options = validate(method.Options, merge(defaults, recipe_keys, _with_counts(given, recipe_keys)))
    if options.labels not in method.scenarios:
        able = ", ".join(sorted(method.scenarios))
        raise UserError(f"method {name} is not defined for labels={options.labels}", f"it works with labels={able}")
    if why := method.refuse(options):
        raise UserError(*why.split("; ", 1))
    return method, options


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


def stored(path: Path) -> tuple[type[Method], Config]:
    """The settings of a run folder."""
    keys = read_yaml(path)
    version = keys.pop("version", None)
    if version != VERSION:
        raise UserError(
            f"{path} was written by another version of Fallow (config version {version}, this one reads {VERSION})",
            "continue the run with the version that began it, or start it again",
        )
    method = find(str(keys.get("method")))
    return method, validate(method.Options, keys)


def config_hash(options: Config) -> str:
    """Equal for runs that must give equal results on one kind of device."""
    keys = {k: v for k, v in options.model_dump(mode="json").items() if k not in UNHASHED}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]
