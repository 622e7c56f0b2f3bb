"""The methods by name, and methods of one's own by FILE.py:Class."""

from __future__ import annotations

import importlib

from fallow import own
from fallow.errors import UserError, suggest
from fallow.methods import checking
from fallow.methods.base import Method
from fallow.names import METHODS as REGISTERED


def find(name: str) -> type[Method]:
    """The method class of a name, of `package.module:Class`, or of `FILE.py:Class`."""
    if name in REGISTERED:
        place, _, attribute = REGISTERED[name].rpartition(":")
        registered: type[Method] = getattr(importlib.import_module(place), attribute)
        return registered
    if name.endswith(".py"):
        raise UserError(f"method={name} names a file and no class in it", f"write {name}:CLASS")
    if ":" not in name:
        raise UserError(f"there is no method {name!r}", suggest(name, REGISTERED))
    found, code = own.load(name, "method")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{code.shown} has no method class {code.attribute!r}", "name a class derived from fallow.Method after the colon")
    checking.check(found, code)
    return found


def is_own(name: str) -> bool:
    """Whether a name is that of code outside the package."""
    return name not in REGISTERED and ":" in name
