"""What travels between server and nodes: a tree of States, tensors and plain values as one text and one flat array per type.

Every array costs a node several requests, so all tensors of a type lie in one; nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow.engine.pack import pack, unpack
from fallow.flower.parcel import Parcel
from fallow.methods.state import Layout

VERSION = 1  # of the protocol; a change of what travels counts up
Layouts = Mapping[str, Layout]
Tree = dict[str, Any]
NAMES = {
    str(t).removeprefix("torch."): t
    for t in (torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
}


class Unreadable(ValueError):
    """What came is no message of this protocol, or not as it was sent; said in words."""


def packed(tree: Tree, layouts: Layouts, about: str = "") -> Parcel:
    """The tree; a tensor that it has several times is written once."""
    shape, tensors = pack(tree, dict(layouts))
    places: dict[str, list[Any]] = {}
    known: dict[int, list[Any]] = {}
    flat: dict[str, list[Tensor]] = {}
    ends: dict[str, int] = {}
    for path, tensor in tensors.items():
        if id(tensor) not in known:
            kind = str(tensor.dtype).removeprefix("torch.")
            start = ends.get(kind, 0)
            known[id(tensor)] = [kind, list(tensor.shape), start]
            flat.setdefault(kind, []).append(tensor.detach().cpu().reshape(-1))
            ends[kind] = start + tensor.numel()
        places[path] = known[id(tensor)]
    arrays = {kind: _array(torch.cat(parts)) for kind, parts in flat.items()}
    head = {"version": VERSION, "tree": shape, "tensors": places, "sha256": {kind: _digest(a) for kind, a in arrays.items()}}
    return Parcel(json.dumps(head), arrays, about)


def unpacked(parcel: Parcel, layouts: Layouts, device: torch.device | str = "cpu") -> Tree:
    """The tree, every part of it checked against what the head promises and States against their nets."""
    try:
        head = json.loads(parcel.head)
        if head["version"] != VERSION:
            raise Unreadable(f"it speaks version {head['version']} of the protocol, not {VERSION}")
        if {kind: _digest(a) for kind, a in parcel.arrays.items()} != head["sha256"]:
            raise Unreadable("its numbers are not those that were sent")
        wholes = {kind: _tensor(a, kind) for kind, a in parcel.arrays.items()}
        tensors = {path: _cut(wholes[kind], shape, start) for path, (kind, shape, start) in head["tensors"].items()}
        _check_states(head["tree"], tensors, layouts)
        return unpack(head["tree"], tensors, dict(layouts), device)
    except Unreadable:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError, OverflowError):
        raise Unreadable("it is no message of this protocol") from None


def _array(tensor: Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(array: np.ndarray, kind: str) -> Tensor:
    found = torch.from_numpy(np.array(array))
    found = found.view(torch.bfloat16) if kind == "bfloat16" else found
    if found.dtype != NAMES[kind] or found.dim() != 1:
        raise Unreadable(f"its array {kind!r} is of another type")
    return found


def _cut(whole: Tensor, shape: list[int], start: int) -> Tensor:
    count = int(torch.Size(shape).numel())
    if min(shape, default=0) < 0 or start < 0 or start + count > len(whole):
        raise Unreadable("a tensor of it lies outside of its array")
    return whole[start : start + count].view(shape)


def _check_states(shape: Any, tensors: Mapping[str, Tensor], layouts: Layouts) -> None:
    """Each group of a State is as long as the net of that name has it."""
    if "state" in shape:
        if shape["state"] not in layouts:
            raise Unreadable(f"it has the state of a net {shape['state']!r} that is not there")
        sizes = dict(layouts[shape["state"]].sizes)
        for group in shape["groups"]:
            found, wanted = tensors[f"{shape['at']}.{group}"], torch.int64 if group == "counters" else torch.float32
            if list(found.shape) != [sizes[group]] or found.dtype != wanted:
                raise Unreadable(f"its {group} of the net {shape['state']!r} are {list(found.shape)} {found.dtype}, not {[sizes[group]]} {wanted}")
    elif "dict" in shape:
        for _, child in shape["dict"]:
            _check_states(child, tensors, layouts)
    elif "list" in shape:
        for child in shape["list"]:
            _check_states(child, tensors, layouts)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B") if array.size else b"").hexdigest()
