"""Which layer of a model is its last."""

from __future__ import annotations

from torch import nn

from fallow.errors import UserError


def head_of(module: nn.Module) -> str:
    """The name of the weight of a model's last layer: of the one it calls `head`, else the last weight that it has."""
    called = getattr(getattr(module, "head", None), "weight", None)
    weights = {name: p for name, p in module.named_parameters() if p.dim() > 1}
    if not weights:
        raise UserError(f"{type(module).__name__} has no layer with a row for each class", "use another model, or another method")
    return next((name for name, p in weights.items() if p is called), [*weights][-1])
