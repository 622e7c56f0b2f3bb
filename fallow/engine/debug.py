"""backend=debug: eager, one party after the other; what fails is named by hook, party, round and step.

The same bits as any other way of running. What hooks give is looked at (hooks.py), and each step's weights.
"""

from __future__ import annotations

from fallow.engine.eager import Eager
from fallow.engine.feed import Step
from fallow.engine.finite import sound
from fallow.engine.site import Sites
from fallow.engine.slot import Slot
from fallow.errors import UserError


class Debug(Eager):
    def __init__(self, sites: Sites):
        super().__init__(sites)
        self.workers = self.kit.sharing = 1

    def make(self, slot: Slot, step: Step) -> None:
        super().make(slot, step)
        held = {name: net.state for name, net in slot.nets.items()} | slot.values
        bad = [name for name, thing in held.items() if not sound(thing)]
        if bad:
            raise UserError(f"{bad[0]!r} became NaN or infinite", "look at the loss of this step, lower lr, or set clip=1")
