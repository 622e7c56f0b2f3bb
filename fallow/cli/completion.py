"""What a shell offers after Tab: keys, their values, recipes. Torch is imported only where nothing else is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fallow.names import METHODS, recipes


def words(typed: Sequence[str], incomplete: str) -> list[str]:
    """What `incomplete` may become after the words that were typed."""
    before = [word for word in typed[-2:] if word != "="]
    if before and before[-1] in common():  # bash takes name, = and value for three words
        return _starting(values(before[-1]), incomplete)
    name, equals, _ = incomplete.partition("=")
    if equals:
        return _starting([f"{name}={value}" for value in values(name)], incomplete)
    found = _starting([f"{key}=" for key in common()], incomplete)
    if not found and incomplete:
        found = _starting([f"{key}=" for key in _of_method(typed)], incomplete)
    if len(found) == 1:  # with a second one a shell puts no space behind the =
        found += [found[0] + value for value in values(found[0][:-1])]
    return found if typed else found + _starting(recipes(), incomplete)


def _starting(all_of_them: Any, start: str) -> list[str]:
    return [one for one in all_of_them if one.startswith(start)]


def common() -> list[str]:
    """Every method's keys, those of sections with their dots."""
    from fallow.config import Config, Section

    out: list[str] = []
    for name, field in Config.model_fields.items():
        sub = type(field.default).model_fields if isinstance(field.default, Section) else ()
        out += [f"{name}.{part}" for part in sub] or [name]
    return out


def _of_method(typed: Sequence[str]) -> Iterator[str]:
    """The own keys of the method that was named, or of every one."""
    from fallow.config import Config
    from fallow.methods import find

    chosen = [w.partition("=")[2] for w in typed if w.startswith("method=")]
    for name in chosen if set(chosen) <= set(METHODS) and chosen else METHODS:
        yield from (key for key in find(name).Options.model_fields if key not in Config.model_fields)


def values(key: str) -> list[str]:
    """What a key takes, where that can be listed; else its default."""
    if key in LISTED:
        return LISTED[key]()
    from fallow.config import KINDS, Config, Section, takes

    fields: dict[str, Any] = Config.model_fields
    section, dot, part = key.partition(".")
    if dot and section in fields and isinstance(fields[section].default, Section):
        fields, key = type(fields[section].default).model_fields, part
    if key not in fields:
        return []
    kinds = [word for word in takes(fields[key].annotation).split(" | ") if word not in KINDS.values()]
    default = fields[key].default
    return kinds or [] if isinstance(default, bool) else kinds or ([] if default in (None, ()) else [str(default)])


def _datasets() -> list[str]:
    from fallow.data.sources import names

    return [d.name.removesuffix("PATH") for d in names()]


def _models() -> list[str]:
    from fallow.models import names

    return list(names())


def _partitions() -> list[str]:
    from fallow.data.partitions import PARTITIONS

    return list(PARTITIONS)


def _views() -> list[str]:
    from fallow.data.views import view_names

    return view_names()


LISTED: dict[str, Callable[[], list[str]]] = {
    "method": lambda: list(METHODS), "data": _datasets, "model": _models, "partition": _partitions, "unlabelled_partition": _partitions,
    "augment.labelled": _views, "augment.weak": _views, "augment.strong": _views,
    "unlabelled_batch": lambda: ["match-steps", "equal", "ratio:", "full"], "schedule": lambda: ["constant", "cosine", "cosine-7-16"],
    "measure": lambda: ["classes", "prior", "diversity", "labels"], "track": lambda: ["tensorboard", "wandb", "mlflow"],
    "device": lambda: ["auto", "cpu", "cuda"],
}  # fmt: skip
