"""Whether a model of one's own can be repeated: the same images, weights and keys must give the same logits."""

from __future__ import annotations

import torch

from fallow.engine.kit import Kit

IMAGES = 4


@torch.no_grad()
def draws_its_own(kit: Kit) -> bool:
    """Whether the run's model, trained, answers the same images differently each time, as one that calls `F.dropout` does."""
    net, start = kit.net(), kit.initial()
    shape = (IMAGES, kit.declared.channels, kit.declared.size, kit.declared.size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kit.device)

    def logits() -> torch.Tensor:
        net.load(start)
        net.begin_step()
        return net(images, stats="batch")

    try:
        one, two = logits(), logits()
    except RuntimeError:  # it takes no such images; its first step says so
        return False
    return not (torch.equal(one, two) if kit.device.type == "cpu" else torch.allclose(one, two, rtol=1e-2, atol=1e-2))
