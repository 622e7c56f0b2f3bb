"""Code of one's own is looked at before the first round: what could not be repeated, or captured, is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fallow import models, own
from fallow.engine import feed, own_models
from fallow.engine.clients import SERVER
from fallow.engine.party import Job, Party, as_found, begin_calls, numbers, run_step, start_of
from fallow.engine.round import Federated
from fallow.engine.site import Site
from fallow.engine.slot import Slot
from fallow.engine.strict import NotCapturable, guarded, outside
from fallow.errors import UserError
from fallow.methods import is_own
from fallow.methods.plan import Plan

MEND = "use masks (masked_mean, torch.where, descend(when=...)) and columns of the plan, or set captured = False"


def inspect(federated: Federated) -> None:
    """Once, as a run begins. On CUDA steps are captured for good, and what cannot be is told there."""
    kit, o = federated.kit, federated.o
    if models.is_own(o.model):
        own_models.check(kit)
    if is_own(o.method) and federated.method.captured and o.capture and kit.device.type == "cpu":
        _try_capturable(federated)


def _try_capturable(f: Federated) -> None:
    """`begin`, and the first step of each kind, of a few parties; any other failure is for the first round to tell."""
    server, entries = f.server, dict(f.server.entries)
    server.draw(0)
    slot, name = Slot(f.kit), f.o.method
    try:
        with outside(f.kit):
            for site in _typical(f):
                _work(site, slot, f._server_job() if site.is_server else Job(site.party, 0, f.method.down(server, site.party)))
    except NotCapturable as e:
        raise UserError(f"the method {name} cannot be captured: {own.line(e, own.find(name, 'method'))}{e}", MEND) from e
    except Exception:
        return
    finally:
        server.entries = entries


def _typical(f: Federated) -> Iterator[Site]:
    """The smallest of the active clients for each kind of stock: labels, unlabelled images, both; and a server that trains."""
    sites = sorted(map(f.simulation.site, f.server.active), key=lambda site: len(site.labelled) + len(site.unlabelled))
    yield from {(bool(len(s.labelled)), bool(len(s.unlabelled))): s for s in reversed(sites)}.values()
    if f.server_trains:
        yield f.simulation.site(SERVER)


def _work(site: Site, slot: Slot, job: Job) -> None:
    method = site.kit.method
    slot.load(*start_of(site.kit, job))
    party = Party(site, slot, job)
    begin_calls(slot, party.key("begin"))
    found = guarded(method.begin, copies=True)(party)
    plan = method.plan(party, as_found(found))
    for segment in {s.step: s for s in reversed(plan.segments) if len(s)}.values():
        one = Plan()
        one.segments = (segment,)
        step = next(feed.steps(site, one, party.key("plan"), partial(numbers, party)))
        run_step(slot, replace(step, function=guarded(step.function)))
