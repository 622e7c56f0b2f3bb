"""Trees of States, tensors, lists and plain values as (JSON, named tensors), and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fallow.errors import UserError
from fallow.methods.sparse import Sparse
from fallow.methods.state import Layout, State, is_plain

Tensors = dict[str, Tensor]
PLAIN = (str, bool, int, float, type(None))


def pack(tree: Any, layouts: dict[str, Layout]) -> tuple[Any, Tensors]:
    """The tree's shape as JSON, its tensors by path."""
    tensors: Tensors = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, State):
            layout = next((name for name, known in layouts.items() if known == node.layout), None)
            if layout is None:
                raise _foreign("a State of a net that no party holds")
            for group, tensor in node.groups.items():
                tensors[f"{path}.{group}"] = _plain(tensor)
            shape = {"state": layout, "at": path, "groups": list(node.groups)}
            return shape | {"changed": walk(node.changed, f"{path}.changed")} if isinstance(node, Sparse) else shape
        if isinstance(node, Tensor):
            tensors[path] = _plain(node)
            return {"tensor": path}
        if isinstance(node, dict):
            if odd := [k for k in node if not isinstance(k, PLAIN)]:
                raise _foreign(f"a dict with a {type(odd[0]).__name__} among its keys")
            return {"dict": [[k, walk(v, f"{path}.{i}")] for i, (k, v) in enumerate(node.items())]}
        if isinstance(node, list | tuple):
            return {"list": [walk(v, f"{path}.{i}") for i, v in enumerate(node)]}
        if not isinstance(node, PLAIN):
            raise _foreign(f"a {type(node).__name__}")
        return {"value": node}

    return walk(tree, "root"), tensors


def apart(tensors: Tensors) -> Tensors:
    """On the CPU and each in memory of its own, as safetensors asks for: a method may keep one State under two names."""
    out: Tensors = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        place = here.untyped_storage().data_ptr()
        out[name] = here.clone() if place in storages else here
        storages.add(place)
    return out


def _plain(tensor: Any) -> Tensor:
    if not is_plain(tensor):
        raise _foreign("a tensor whose numbers are not all there" if isinstance(tensor, Tensor) else f"a State with a {type(tensor).__name__} in it")
    return tensor


def _foreign(what: str) -> UserError:
    return UserError(f"a method keeps or sends {what}, which no checkpoint holds", "keep States, tensors, numbers, texts, and lists and dicts of them")


def unpack(shape: Any, tensors: Tensors, layouts: dict[str, Layout], device: Any) -> Any:
    if "state" in shape:
        groups = {g: tensors[f"{shape['at']}.{g}"].to(device) for g in shape["groups"]}
        state = State(layouts[shape["state"]], groups)
        return Sparse.known(state, tensors[shape["changed"]["tensor"]].to(device)) if "changed" in shape else state
    if "tensor" in shape:
        return tensors[shape["tensor"]].to(device)
    if "dict" in shape:
        return {k: unpack(v, tensors, layouts, device) for k, v in shape["dict"]}
    if "list" in shape:
        return [unpack(v, tensors, layouts, device) for v in shape["list"]]
    return shape["value"]


def size(tree: Any) -> int:
    """Bytes of the tensors in a tree."""
    if isinstance(tree, State):
        return tree.nbytes
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(size(v) for v in tree.values())
    if isinstance(tree, list | tuple):
        return sum(size(v) for v in tree)
    return 0
