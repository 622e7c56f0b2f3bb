"""Sparse States as they travel: only what changed, beside a digest of what it is to be put upon."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow.flower.messages import Unreadable
from fallow.methods.sparse import Sparse, decoded, encoded
from fallow.methods.state import State

KEYS = {"sparse", "of"}


def thinned(tree: Any) -> Any:
    """The tree, of whose Sparse States only the changes are left."""
    if isinstance(tree, Sparse) and tree.old is not None:
        return {"sparse": torch.from_numpy(np.frombuffer(encoded(tree, tree.old), np.uint8).copy()), "of": _digest(tree.old)}
    if isinstance(tree, dict):
        return {k: thinned(v) for k, v in tree.items()}
    return [thinned(v) for v in tree] if isinstance(tree, list | tuple) else tree


def whole(tree: Any, known: Iterable[Any]) -> Any:
    """The tree as it was before `thinned`, by the States that are known here."""

    @cache
    def bases() -> dict[str, State]:
        return {_digest(s): State(s.layout, s.groups) for s in known if isinstance(s, State)}

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return _whole(node, bases()) if node.keys() == KEYS else {k: walk(v) for k, v in node.items()}
        return [walk(v) for v in node] if isinstance(node, list) else node

    return walk(tree)


def _whole(node: dict[str, Any], bases: dict[str, State]) -> Sparse:
    changes, old = node["sparse"], bases.get(node["of"])
    if old is None:
        raise Unreadable("it has changes of a net that is not there")
    try:
        return Sparse(decoded(changes.cpu().numpy().tobytes(), old), old)
    except (ValueError, IndexError, TypeError, AttributeError, RuntimeError):
        raise Unreadable("its changes do not fit their net") from None


def _digest(state: State) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(state.groups.items()):
        found.update(f"{name}:{tensor.dtype}:".encode() + _bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
