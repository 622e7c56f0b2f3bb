"""What a method's `holds` names: nets and small tensors, under names by which a slot and a party can be asked for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, get_args

from torch import nn

from fallow.config import Config, Kept, validate
from fallow.errors import UserError
from fallow.limits import check_room, is_whole
from fallow.methods.base import AnyMethod, Held, Net, Value

STEPPING = ("optimizer", "momentum", "nesterov", "weight_decay", "clip", "clip_value")  # what a net may have of its own
FORM = 'write for example return {"model": Net(), "tau": Value(1)}'


def held(method: AnyMethod) -> Held:
    """What the method holds, or a sentence where that cannot be held."""
    found: Any = method.holds()
    if not isinstance(found, Mapping):
        raise _wrong(f"gives {'nothing' if found is None else f'a {type(found).__name__}'}, and no dict of what is held", FORM)
    for name, spec in found.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise _wrong(f"names something {name!r}, which s.NAME could not ask for", "choose a name of letters, digits and _")
        if not isinstance(spec, Net | Value):
            raise _wrong(f"names {name!r}, which is neither a Net nor a Value", FORM)
        _check_net(name, spec) if isinstance(spec, Net) else _check_value(name, spec)
    if not any(isinstance(spec, Net) for spec in found.values()):
        raise _wrong("names no Net, so that there is nothing to train", FORM)
    return dict(found)


def _check_net(name: str, spec: Net) -> None:
    if spec.make is not None and not callable(spec.make):
        raise _wrong(f"has a Net {name!r} with make={spec.make!r}", "give a function of the number of classes that returns a module")
    if spec.make is not None and name == "model":
        raise _wrong("has a Net 'model' of another make than the run's model, which is what is tested and saved", "leave `make` out, and name the class by the key model=FILE.py:Class")
    if spec.start is not None and not isinstance(spec.start, str):
        raise _wrong(f"has a Net {name!r} with start={spec.start!r}", "name an entry of the message, or give initial or random")
    if spec.optimizer not in (None, *get_args(Kept)):
        raise _wrong(f"has a Net {name!r} with optimizer={spec.optimizer!r}", f"give {', '.join(get_args(Kept))}, or leave it out")
    if spec.options is not None and not isinstance(spec.options, Mapping):
        raise _wrong(f"has a Net {name!r} with options={spec.options!r}", "give a dict of keys")
    for key in spec.options or ():
        if key not in STEPPING:
            raise _wrong(f"has a Net {name!r} with an option {key!r}", f"its own can be {', '.join(STEPPING)}")
    validate(Config, dict(spec.options or {}))


def _check_value(name: str, spec: Value) -> None:
    sizes = [1 if isinstance(n, str) and n == "unlabelled" else n for n in spec.shape]
    if not all(map(is_whole, sizes)):
        raise _wrong(f"has a Value {name!r} of the shape {spec.shape}", "give counts, or the word unlabelled")
    if not isinstance(spec.start, Real):
        raise _wrong(f"has a Value {name!r} that starts from {spec.start!r}", "give a number")
    check_room(4 * math.prod(map(int, sizes)), f"what the method holds as {name!r}", "hold less")


def check_names(names: Iterable[str], thing: Any) -> None:
    """What is held is asked for as an attribute of a slot or a party, which has others."""
    for name in names:
        if name in vars(thing) or hasattr(type(thing), name):
            raise _wrong(f"names {name!r}, which a {type(thing).__name__.lower()} has already", "choose another name")


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise _wrong(f"has a Net whose `make` gives {'nothing' if module is None else f'a {type(module).__name__}'}", "return a torch.nn.Module")


def _wrong(what: str, remedy: str) -> UserError:
    return UserError(f"`holds` {what}", remedy)
