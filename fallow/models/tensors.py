"""Which tensors of a model of one's own a State holds as they are; others are refused by name, since they would silently become others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fallow.errors import UserError

OWN = {torch.bool, torch.uint8}  # where ~, an index or a sum means something else than of int64, which a State has


def check_tensors(net: nn.Module, what: str) -> None:
    named = list(net.named_parameters(remove_duplicate=False))
    if not named:
        raise UserError(f"{what} has no parameters", "a model is trained by its parameters: nn.Parameter, or layers that have some")
    for name, parameter in named:
        _check(name, parameter, what)
        if not parameter.requires_grad:
            raise UserError(f"{what} does not train its parameter {name!r}", "register it as a buffer, or leave requires_grad as it is")
    kept = net.state_dict(keep_vars=True)
    seen: dict[int, str] = {}
    for name, buffer in net.named_buffers(remove_duplicate=False):
        if name not in kept:
            continue
        _check(name, buffer, what)
        if buffer.dtype in OWN:
            kind = str(buffer.dtype).removeprefix("torch.")
            raise UserError(f"{what} has a buffer {name!r} of {kind}, which a State holds as whole numbers", "register it with persistent=False if it never changes, else as float")
        if seen.setdefault(id(buffer), name) != name and _owner(net, name) is not _owner(net, seen[id(buffer)]):
            raise UserError(f"{what} has one buffer under two names, {seen[id(buffer)]!r} and {name!r}", "register it once")


def _check(name: str, tensor: Tensor, what: str) -> None:
    if is_lazy(tensor):
        raise UserError(f"{what} has a lazy layer, of which {name!r} has no size yet", "give the layer its sizes")
    if tensor.is_complex():
        raise UserError(f"{what} has complex numbers in {name!r}, of which a State would keep the real part", "hold real and imaginary part, as torch.view_as_real does")


def _owner(net: nn.Module, name: str) -> nn.Module:
    return net.get_submodule(name.rpartition(".")[0])
