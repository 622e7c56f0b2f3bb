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
        return {"sparse": torch.from_numpy(np.frombuffer(encoded(tree, tree.old), np.uint8).copy()), "of": _digests(tree.old)}
    if isinstance(tree, dict):
        return {k: thinned(v) for k, v in tree.items()}
    return [thinned(v) for v in tree] if isinstance(tree, list | tuple) else tree


def whole(tree: Any, known: Iterable[Any]) -> Any:
    """The tree as it was before `thinned`, by the States that are known here."""

    @cache
    def bases() -> list[tuple[State, dict[str, str]]]:
        return [(s, _digests(s)) for s in known if isinstance(s, State)]

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return _whole(node, bases()) if node.keys() == KEYS else {k: walk(v) for k, v in node.items()}
        return [walk(v) for v in node] if isinstance(node, list) else node

    return walk(tree)


def _whole(node: dict[str, Any], bases: list[tuple[State, dict[str, str]]]) -> Sparse:
    try:
        wanted = node["of"].items()
        found = next((s for s, digests in bases if wanted <= digests.items()), None)  # a party may keep more of a net than travels
        if found is None:
            raise Unreadable("it has changes of a net that is not there")
        old = State(found.layout, {group: found.groups[group] for group, _ in wanted})
        return Sparse(decoded(node["sparse"].cpu().numpy().tobytes(), old), old)
    except Unreadable:
        raise
    except (ValueError, IndexError, TypeError, AttributeError, RuntimeError):
        raise Unreadable("its changes do not fit their net") from None


def _digests(state: State) -> dict[str, str]:
    """Of each group."""
    return {group: hashlib.sha256(str(t.dtype).encode() + _bytes(t)).hexdigest() for group, t in state.groups.items()}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
