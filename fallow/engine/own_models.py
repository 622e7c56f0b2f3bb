"""A model of one's own before the first round: what its State does not hold, or what cannot be repeated, is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fallow import own
from fallow.engine.kit import Kit
from fallow.engine.memory import out_of_memory
from fallow.engine.nets import NetHandle
from fallow.errors import UserError

IMAGES = 4
HELD = "hold it in parameters and in buffers, which are sent, averaged and stored"


def check(kit: Kit) -> None:
    """Once, as a run begins: a few images are put through two nets of the same weights."""
    name = kit.options.model
    try:
        with own.told(own.find(name, "model")):
            found = next(_faults(kit), None)
    except UserError as e:
        if (error := e.__cause__) is not None and out_of_memory(error):
            raise error from None
        raise
    if found:
        cause, remedy = found
        raise UserError(f"the model {name} {cause}", remedy)


@torch.no_grad()
def _faults(kit: Kit) -> Iterator[tuple[str, str]]:
    """What is wrong with the run's model, and what to do about it, the plainest first."""
    if any(not t.equal(kit.fresh("model", 0).groups[g]) for g, t in kit.fresh("model", 0).groups.items()):
        yield "draws its first weights by other means than torch, so no seed repeats them", "draw them by torch"
    net, start = kit.net(), kit.initial()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # what is not loaded is another in it
        other = kit.net()
    images = torch.randn(kit.blank(IMAGES).shape, generator=torch.Generator().manual_seed(0)).to(kit.device)

    def logits(of: NetHandle, stats: str) -> Tensor:
        of.load(start)
        of.begin_step()
        return of.raw(given, stats)

    given, before = images.clone(), _generators(kit.device)
    first = logits(net, "batch")
    drawn = any(not old.equal(new) for old, new in zip(before, _generators(kit.device)))
    if not isinstance(first, Tensor) or first.shape != (IMAGES, kit.classes):
        found = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        yield f"makes {found} of {IMAGES} images", f"let it return their logits, a tensor of shape ({IMAGES}, {kit.classes})"
    if anew := net.strays():
        yield f"assigns its buffer {anew[0]!r} anew in a pass, which the State does not see", "change it in place: self.NAME.copy_(...)"
    if not given.equal(images):
        yield "changes the images that it is given in place", "work on a copy: x = x * 2, not x *= 2"
    if drawn or not _same(first, logits(net, "batch")):
        why = "draws random numbers that are torch's own, so its runs could be neither repeated nor resumed exactly"
        yield why, "use nn.Dropout, which is keyed, in place of F.dropout and torch.rand"
    logits(net, "update")  # after which nothing of it is left
    if not all(_same(logits(net, stats), logits(other, stats)) for stats in ("running", "batch")):
        yield "has more than its State holds: two nets of the same weights give other logits, one of which has trained before", HELD


def _generators(device: torch.device) -> list[Tensor]:
    """What torch would draw from next."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _same(one: Tensor, other: Tensor) -> bool:
    near = 0.0 if one.device.type == "cpu" else 1e-2
    return torch.allclose(one, other, rtol=near, atol=near, equal_nan=True)
