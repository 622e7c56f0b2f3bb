"""Clients on machines of their own: the seam between the round and its clients (engine/clients.py), over an exchange of messages.

Nothing partial is ever merged: a node's answer counts whole, or the node was absent from the round, and is named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fallow.engine.clients import SERVER, Executor, Reply, Request, Samples
from fallow.engine.keep import Keep, Owner
from fallow.engine.party import Job, Outcome
from fallow.engine.simulation import Simulation
from fallow.errors import UserError
from fallow.flower import checks
from fallow.flower.answers import Answers, large
from fallow.flower.checks import Refused
from fallow.flower.messages import Tree, packed
from fallow.flower.parcel import Parcel
from fallow.flower.roster import Roster
from fallow.flower.terms import Terms
from fallow.flower.thin import thinned
from fallow.runs.nodes import JOURNAL


class Sent(Protocol):
    """Messages on their way; nodes answer in whatever order."""

    def next(self, until: float) -> tuple[int, Parcel | str] | None:
        """A node, and its answer or why there is none; None at the time `until` (time.monotonic)."""

    def close(self) -> None: ...


class Exchange(Protocol):
    def online(self) -> set[int]:
        """The ids of the nodes that are there."""

    def send(self, orders: Mapping[int, Parcel], kind: str, patience: float) -> Sent:
        """To each node what it is asked."""


class Nodes:
    """What a client keeps is on its node; here is only noted of which round it is (`keep.version`)."""

    def __init__(
        self, simulation: Simulation, executor: Executor, keep: Keep, *, exchange: Exchange, roster: Roster, terms: Terms, about: Tree, folder: Path,
        ask_here: Callable[..., list[Any]], tell: Callable[[str], None] = print,
    ):  # fmt: skip
        self.executor, self.keep, self.exchange, self.roster, self.terms = executor, keep, exchange, roster, terms
        kit = simulation.kit
        self.wanted, self.about, self.run, self.layouts = kit.options.active_count, json.dumps(about), about["run"], kit.layouts()
        self.folder, self.ask_here, self.tell = folder, ask_here, tell
        self._used: dict[Owner, int] = {}  # client -> round (from 1) of its update, in a round that has not taken effect
        self._row: Tree = {}  # of the journal, of the round at hand
        self._round = 0
        self._device, self._classes, self._checks, self._federation = kit.device, kit.classes, Answers(kit), simulation.federation

    # -- the seam ------------------------------------------------------------------------------------------------------
    def train(self, requests: Sequence[Request], here: Sequence[Job] = ()) -> tuple[list[Reply | None], list[Outcome]]:
        self._used, number = {}, requests[0].round + 1 if requests else 0
        self._row["asked"] = [r.party for r in requests]
        good: dict[int, Reply] = {}
        own: list[Outcome] | None = None
        messages = {r.party: r.message for r in requests}
        for _ in range(1 + self.terms.round_retries):
            sent = self._post("train", [r for r in requests if r.party not in good])
            own = self.executor.run(list(here)) if own is None and here else own or []
            for client, tree in self._answers(sent, enough=lambda: len(good) >= self.wanted):
                try:
                    good[client] = checks.reply(tree, client, self._round, messages[client], self._held(client), self._classes)
                    self._row.get("absent", {}).pop(client, None)
                except Refused as e:
                    self._absent(client, str(e))
            for wrong in (checks.odd, partial(checks.long, sent=messages, limit=self.terms.update_norm_limit)):
                for client, why in wrong(good).items():
                    del good[client]
                    self._absent(client, why)
            if len(good) >= min(self.wanted, self.terms.least(len(requests))):
                break
        else:
            least = min(self.wanted, self.terms.least(len(requests)))
            told = "; ".join(f"client {c}: {why}" for c, why in sorted(self._row.get("absent", {}).items()))
            raise UserError(
                f"round {number} has {len(good)} replies, fewer than {least} (min_replies), after {1 + self.terms.round_retries} tries ({told})",
                "bring the nodes back, then go on with `fallow federation run --resume`; the rounds before it are kept",
            )
        self._used = dict.fromkeys(good, number)
        return [good.get(r.party) for r in requests], own or []

    def ask(self, question: str, requests: Iterable[Request], after: bool = False, **about: Any) -> list[Any]:
        asked = list(requests)
        found: dict[int, Any] = {}
        remote = [r for r in asked if r.party > SERVER]
        sent = self._post("ask", remote, after, question=question, about=about) if remote else None
        for k, request in enumerate(asked):  # the server's own samples
            if request.party <= SERVER:
                found[-1 - k] = self.ask_here(question, [request], **about)[0]
        if sent is not None:
            for client, tree in self._answers(sent):
                try:
                    found[client] = self._checks.checked(question, tree.get("answer"), about, self._held(client).all)
                except Refused as e:
                    self._absent(client, str(e))
            for client, why in (large(found, self.terms.update_norm_limit) if question == "moments" else {}).items():
                if client > SERVER:
                    del found[client]
                    self._absent(client, why)
        return [found.get(r.party if r.party > SERVER else -1 - k) for k, r in enumerate(asked)]

    def _held(self, client: int) -> Samples:
        """What a client had when the run was begun."""
        there = self._federation.clients[client]
        return Samples(len(there.labelled), len(there.labelled) + len(there.unlabelled))

    def settle(self, round: int) -> None:
        self.keep.version.update(self._used)
        self._used = {}
        empty: Tree = {"asked": [], "absent": {}, "seconds": {}, "bytes_up": {}, "bytes_down": {}}
        row = empty | self._row | {"round": round, "online": sorted(self.roster.here()), "at": round_time()}
        row["absent"] = {str(c): why for c, why in row["absent"].items()}
        self._row = {}
        with (self.folder / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    # -- messages ------------------------------------------------------------------------------------------------------
    def _post(self, kind: str, requests: Sequence[Request], after: bool = False, **more: Any) -> tuple[Sent, dict[int, int], float]:
        """Sends each client that is there its message; the messages on their way, whose node is which client's, and until when."""
        self._round = requests[0].round if requests else self._round
        there, orders = self.roster.refresh(), {}
        for request in requests:
            if request.party not in there:
                self._absent(request.party, "it is not online")
                continue
            kept = self.keep.version.get(request.party, 0)
            tree = {
                "do": kind, "client": request.party, "round": request.round, "message": thinned(request.message), "until": time.time() + self.terms.round_timeout,
                "kept": self._used.get(request.party, kept) if after else kept,
                "needed": sorted({kept, *(v.get(request.party, 0) for v in self.keep.committed)} - {0}), **more,
            }  # fmt: skip
            orders[request.party] = packed(tree, self.layouts, self.about)
            self._add("bytes_down", request.party, orders[request.party].nbytes)
        clients = {there[c]: c for c in orders}
        sent = self.exchange.send({there[c]: order for c, order in orders.items()}, kind, self.terms.round_timeout)
        return sent, clients, time.monotonic() + self.terms.round_timeout

    def _answers(self, posted: tuple[Sent, dict[int, int], float], enough: Callable[[], bool] = lambda: False) -> Iterable[tuple[int, Tree]]:
        """Each client's answer as it comes; who gives none in time is absent."""
        sent, clients, until = posted
        waiting = dict(clients)
        try:
            while waiting and not enough():
                came = sent.next(until)
                if came is None:
                    break
                node, answer = came
                if node not in waiting:
                    continue
                client = waiting.pop(node)
                if isinstance(answer, str):
                    self._absent(client, answer)
                    continue
                self._add("bytes_up", client, answer.nbytes)
                try:
                    tree = checks.opened(answer, self.layouts, self.run, client, self._round, self._device)
                except Refused as e:
                    self._absent(client, str(e))
                    continue
                self._add("seconds", client, float(tree["seconds"]))
                yield client, tree
        finally:
            sent.close()
        for client in waiting.values():
            self._absent(client, "others were sooner (over_select)" if enough() else f"it did not answer within {self.terms.round_timeout:g} s")

    def _absent(self, client: int, why: str) -> None:
        self._row.setdefault("absent", {})[client] = why
        self.tell(f"round {self._round + 1}: client {client} is left out: {why}")

    def _add(self, column: str, client: int, value: float) -> None:
        told = self._row.setdefault(column, {})
        told[str(client)] = round(told.get(str(client), 0) + value, 4)


def round_time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
