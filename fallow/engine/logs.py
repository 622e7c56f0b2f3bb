"""What a method may log: columns of its own, of values that JSON has a word for."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow.errors import UserError
from fallow.measure.scores import EACH_TEST
from fallow.methods.state import is_plain

RESERVED = {"round", "accuracy", "test_loss", "bytes_up", "bytes_down", "lr", "clients", "client_steps", "descended", "unused", "outside", "seconds"}
RESERVED |= {*EACH_TEST, "validation_accuracy", "validation_loss", "class_accuracy", "prior_js", "diversity", "R", "label_accuracy_local", "label_accuracy_global"}  # measured
NUMBERS = {"loss", "label_ratio", "label_accuracy", "label_accuracy_all"}  # columns that others read, and a method may fill
COUNTS = {"label_classes", "label_confidences"}
LARGEST = sys.float_info.max


def at_server(name: str, value: Any) -> Any:
    """What `server.log` is given, as a row of metrics has it."""
    _check_name(name)
    told = _plain(name, value)
    if name in NUMBERS and not (told is None or isinstance(told, Real)):
        raise _refused(name, value, "give a number, or None")
    if name in COUNTS and not (isinstance(told, list) and all(type(n) is int and n >= 0 for n in told)):
        raise _refused(name, value, "give a list of counts")
    return told


def of_party(name: str, value: Any) -> float | Tensor | tuple[Tensor, Tensor]:
    """What a step or a party logs: a number, a tensor of numbers, or one with a mask."""
    _check_name(name)
    if "/" in name or name in COUNTS:
        raise UserError(f"a method cannot log {name!r} of a party", "choose another name, without a slash")
    if _has_numbers(value):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(map(_has_numbers, value)) and _fit(*value):
        return value
    if isinstance(value, np.generic | np.ndarray) and not value.ndim:
        value = value.item()
    if isinstance(value, Real):
        return float(value)
    raise _refused(name, value, "give a number, a tensor of numbers, or such a tensor and a mask of its shape")


def _check_name(name: str) -> None:
    if name in RESERVED:
        raise UserError(f"a method cannot log {name!r}, a column of every run's metrics", "choose another name")


def _plain(name: str, value: Any) -> Any:
    """Tensors and arrays as lists; numbers are those that a float can hold, or none."""
    if _has_numbers(value) or isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, dict) and all(isinstance(k, str | int) for k in value):
        return {k: _plain(name, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, v) for v in value]
    if value is None or isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) <= LARGEST):
        return value
    raise _refused(name, value, "give a number, a text, or lists and dicts of them")


def _has_numbers(value: Any) -> bool:
    return is_plain(value) and not value.is_complex()


def _fit(values: Tensor, mask: Tensor) -> bool:
    try:
        torch.broadcast_shapes(values.shape, mask.shape)
    except RuntimeError:
        return False
    return True


def _refused(name: str, value: Any, remedy: str) -> UserError:
    if isinstance(value, tuple) and all(isinstance(v, Tensor) for v in value):
        what = f"tensors of the shapes {' and '.join(str(tuple(v.shape)) for v in value)}"
    elif isinstance(value, Tensor):
        what = f"a tensor of {value.dtype} that is no plain array of real numbers"
    else:
        what = "nothing" if value is None else "a number that no float can hold" if isinstance(value, int) else f"a {type(value).__name__}"
    return UserError(f"a method logs {what} as {name!r}", remedy)
