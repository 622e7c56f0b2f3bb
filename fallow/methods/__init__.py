"""The methods by name, and methods of one's own by FILE.py:Class."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from fallow.errors import UserError, suggest
from fallow.methods.base import Method

REGISTERED: dict[str, str] = {
    "fedavg": "fallow.methods.fedavg:FedAvg",
    "fedprox": "fallow.methods.fedavg:FedProx",
    "fixmatch": "fallow.methods.fixmatch:FixMatch",
    "uda": "fallow.methods.fixmatch:UDA",
    "semifl": "fallow.methods.semifl:SemiFL",
    "feddb": "fallow.methods.feddb:FedDB",
    "fedrgd": "fallow.methods.fedrgd:FedRGD",
    "fedloke": "fallow.methods.fedloke:FedLoKe",
    "feddure": "fallow.methods.feddure:FedDure",
}


def find(name: str) -> type[Method]:
    """The method class of a name, of `package.module:Class`, or of `FILE.py:Class`."""
    where = REGISTERED.get(name, name)
    if ":" not in where:
        raise UserError(f"there is no method {name!r}", suggest(name, REGISTERED))
    place, _, attribute = where.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{place} has no method class {attribute!r}", "name a class derived from fallow.Method after the colon")
    return found


def _imported(place: str):  # type: ignore[no-untyped-def]
    try:
        return importlib.import_module(place)
    except (ImportError, ValueError, TypeError) as e:  # an empty name, a relative one
        raise UserError(f"module {place!r} cannot be imported ({e})", "check the name, or give FILE.py:Class") from None


def _from_file(path: Path):  # type: ignore[no-untyped-def]
    if not path.is_file():
        raise UserError(f"there is no method file {path}", "check the path before the colon")
    name = f"fallow_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        raise UserError(f"{path} is not valid Python in line {e.lineno}", "mend the file") from None
    return module
