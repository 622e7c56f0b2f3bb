"""Clients that are simulated: all of them in this process, or in its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fallow.engine.clients import Executor, Reply, Request
from fallow.engine.keep import Keep
from fallow.engine.party import Job, Outcome
from fallow.engine.questions import Questions
from fallow.engine.site import Sites


class Local:
    """All clients are in this process (or its ranks), simulated one after the other or side by side."""

    def __init__(self, sites: Sites, executor: Executor, keep: Keep):
        self.executor, self.keep = executor, keep
        self._questions = Questions(sites)
        self._kept: dict[int, dict[str, Any]] = {}  # in a round that has not taken effect

    def train(self, requests: Sequence[Request], here: Sequence[Job] = ()) -> tuple[list[Reply | None], list[Outcome]]:
        self._kept = {}
        outcomes = self.executor.run([*map(self._job, requests), *here])
        clients = outcomes[: len(requests)]
        self._kept = {o.party: o.record for o in clients}
        return list(clients), outcomes[len(requests) :]

    def ask(self, question: str, requests: Iterable[Request], after: bool = False, **about: Any) -> list[Any]:
        return self._questions.ask((self._job(r, after) for r in requests), question, **about)

    def settle(self, round: int) -> None:
        self.keep.write(self._kept, round)
        self._kept = {}

    def _job(self, request: Request, after: bool = False) -> Job:
        if isinstance(request, Job):  # the server's, who has its own at hand
            return request
        record = self.keep.read(request.party)
        return Job(**vars(request), record=record | self._kept.get(request.party, {}) if after else record)
