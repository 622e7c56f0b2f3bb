"""Keys that a run's method does not have, though other methods do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method
from fallow.trees import shown


def having(name: str) -> list[str]:
    """The methods that have a key.

    >>> having("mixup"), having("thresold")
    (['semifl'], [])
    """
    return [method for method in REGISTERED if name in find(method).Options.model_fields]


def lacking(keys: Iterable[Any], method: type[Method]) -> list[str]:
    """The keys that the method has not and another one has."""
    return [k for k in keys if isinstance(k, str) and k not in method.Options.model_fields and having(k)]


def check(keys: Mapping[str, Any], method: type[Method], name: str) -> None:
    """Refuses a key that the method has not, and says who has it, or one of nearly its name."""
    for key in (k for k in keys if isinstance(k, str) and k not in method.Options.model_fields):
        near = _near(key, method.Options.model_fields)
        if methods := having(key):
            also = f" (or do you mean {near!r}?)" if near else ""
            raise UserError(f"method {name} has no key {key!r}", f"leave it out, {_listed(methods)} it{also}")
        if near is None and (other := _near(key, {k for m in REGISTERED for k in find(m).Options.model_fields})):
            raise UserError(f"there is no key {key!r}", f"if {other!r} is meant: {_listed(having(other))} it, {name} has not")
        if near is None:
            raise UserError(f"there is no key {shown(repr(key))}", f"`fallow run method={name} --help` lists those there are")


def _near(key: str, known: Collection[str]) -> str | None:
    found = difflib.get_close_matches(key, known, n=1)
    return found[0] if found else None


def _listed(methods: list[str]) -> str:
    return f"{methods[0]} has" if len(methods) == 1 else f"{', '.join(methods[:-1])} and {methods[-1]} have"
