"""A method of one's own in one file: `fallow run method=./my_method.py:MyMethod sharpness=0.2 rounds=10`.

Mean teacher with entropy minimisation: the net learns labels, follows what a slow average of itself says of unlabelled
images, and is asked to be sure of them. The average stays with the client.
"""

import torch

from fallow import Method, Net, Plan, key
from fallow.methods.base import Batch, Found, Held, NetHandle, Party, Slot
from fallow.methods.parts.batching import paired
from fallow.methods.parts.losses import cross_entropy, entropy, kl


class Teaching(Slot):
    teacher: NetHandle


class MyMethod(Method[Teaching]):
    """Mean teacher with entropy minimisation at every client."""

    paper = "an example"
    keeps = "teacher"
    scenarios = {"server", "clients", "some"}

    class Options(Method.Options):
        teacher_decay: float = key(0.9, "how slowly the teacher follows the net", "alpha", ge=0, le=1)
        sharpness: float = key(0.1, "weight of the entropy of unlabelled images", "beta", ge=0)

    o: Options

    def holds(self) -> Held:
        return {"model": Net(), "teacher": Net(keep=True, train=False)}

    def plan(self, party: Party, found: Found) -> Plan:
        x, u = paired(party, "labelled", ("weak", "strong"))
        return Plan(x=x, u=u)

    def step(self, s: Teaching, b: Batch) -> None:
        zx, zs = s.model.together(b.x.labelled, b.u.strong)
        loss = cross_entropy(zx, b.x.y) if b.x else 0.0
        if b.u:
            with torch.no_grad():
                target = s.teacher(b.u.weak, stats="batch").softmax(1)
            loss = loss + kl(target, zs).mean() + self.o.sharpness * entropy(zs.softmax(1)).mean()
            s.judge(b.u, target.argmax(1))
        s.descend(loss)
        s.teacher.follow(s.model, self.o.teacher_decay)
        s.log(loss=loss)
