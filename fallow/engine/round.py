"""The round: draw, send down, local work, send up, merge, the server's turn, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fallow.engine import outside
from fallow.engine.clients import SERVER, Clients, Executor, Reply, Request
from fallow.engine.eager import over_ranges
from fallow.engine.evaluating import Validation, columns
from fallow.engine.finite import defined, sound, too_large
from fallow.engine.hooks import at
from fallow.engine.keep import Keep
from fallow.engine.local import Local
from fallow.engine.measuring import Measuring
from fallow.engine.memory import out_of_memory
from fallow.engine.pack import size
from fallow.engine.party import LARGE, Job, Outcome, Tally, mean_rate
from fallow.engine.server import Server
from fallow.engine.simulation import Simulation
from fallow.engine.statistics import static
from fallow.errors import UserError, first_line
from fallow.measure import scores
from fallow.methods import is_own
from fallow.methods.base import Net, Updates
from fallow.methods.state import State

Versions = dict[int, tuple[str, int]]  # of tensors: by identity, the entry's name and torch's count of writes


class Federated:
    """A federation at work. One call of `round` is one round; what it changed takes effect at its end, all at once."""

    def __init__(self, simulation: Simulation, executor: Executor, keep: Keep, clients: Clients | None = None):
        """`executor` does the server's own work; the clients are where `clients` says, by default they are simulated here."""
        self.simulation, self.kit = simulation, simulation.kit
        self.method, self.o = self.kit.method, self.kit.options
        self.executor, self.keep = executor, keep
        self.clients: Clients = clients or Local(simulation, executor, keep)
        self.server = Server(self.kit, keep)
        self.server["model"] = self.kit.policy.travels(self.kit.initial())
        self._outside = outside.kept(self.method) if is_own(self.o.method) else None
        with at("start", self.kit, 0):
            self.method.start(self.server)
        self.server.pool.settle(0)
        self.seconds: dict[str, float] = {}
        self.whole = True  # false if a failure left kept records of a round that is not in effect
        self.finishing: Callable[[], None] = lambda: None  # called when a round begins to take effect
        self._inference = self.kit.net()
        self.measuring, self.validation = Measuring(self), Validation(self)
        self._tested: tuple[State, torch.Tensor] | None = None
        self._verdicts: list[tuple[str, torch.Tensor]] = []  # where numbers were made in this round, and if they are sound

    @property
    def server_trains(self) -> bool:
        return len(self.simulation.federation.server.labelled) > 0

    # -- a round -----------------------------------------------------------------------------------------------------
    def round(self, number: int) -> dict[str, Any]:
        """Carries out round `number` (from 0); its row of metrics. If it fails, the round before still stands."""
        entries = dict(self.server.entries)
        while True:
            try:
                return self._round(number)
            except BaseException as e:
                self.server.entries = dict(entries)
                if too_large(e):
                    told = f"a number is too large to compute with in round {number + 1} ({first_line(e)})"
                    raise UserError(told, "look for a very large number among the settings; the rounds before it are kept") from e
                if not (isinstance(e, RuntimeError) and out_of_memory(e) and self.whole):
                    raise
            self._tested = None
            self.executor.shrink()

    def _round(self, number: int) -> dict[str, Any]:
        server, turn = self.server, self.o.server_turn if self.server_trains else ""
        self.seconds, server.logs, server.pool.new, tally, self._tested, self._verdicts = {}, {}, {}, Tally(), None, []
        self.kit.finished = 0
        self.validation.forget()
        server.draw(number, self._warming() if number < self.o.warmup_rounds else None)
        last = number + 1 == self.o.rounds
        if turn.startswith("before"):
            self._turn(tally)
        with self._phase("statistics"):
            server["model"] = self._for_use(self.kit.policy.begin(server.model, self.o.sbn_data))
        server.sent = server.model
        before = versions(server.entries)
        requests, beside = self._requests(), self._beside(turn)
        self._check_unchanged(before, "`down`")
        with self._phase("clients"):
            replies, own = self.clients.train(requests, beside)
            self._check_unchanged(before, "what a party does")
            present: list[Reply] = [r for r in (*replies, *own) if r is not None]
            self._check(present, tally)
        with self._phase("merge"):
            for outcome in own:
                self._keep_server(outcome)
            updates = self._updates(replies, own)
            if updates:
                with at("merge", self.kit, server.round):
                    self.method.merge(server, updates)
            self._judge("the merge", server.entries, server.pool.new)
        if turn.startswith("after"):
            self._turn(tally)
        if turn.endswith("+last") and last:
            self._turn(tally, again=True)
        row = {"round": number + 1} | self._evaluated(number, last)
        measured: dict[str, Any] = {}
        if self.measuring.due(number):
            with self._phase("measure"):
                measured = self.measuring.row([*requests, *beside], present)
        row = defined(row | self._metrics(requests, present, updates, tally) | measured)
        self._refuse_unsound()
        self.finishing()
        self.whole = False
        self.clients.settle(number + 1)
        server.pool.settle(number + 1)
        self.validation.settle()
        self.whole = True
        return row

    def _check_unchanged(self, before: Versions, what: str) -> None:
        """What lasts at the server is sent as it is: a party that changed it in place would change what the others receive."""
        now = versions(self.server.entries)
        for place, (name, version) in before.items():
            if place in now and now[place][1] != version:
                raise UserError(f"{what} in {self.o.method} changes server[{name!r}] in place, which other parties receive, too", "work on a copy: tensor.clone()")

    def _warming(self) -> set[int]:
        """Who trains before the others: the clients with labels; none where the server has them."""
        labelled = {i for i, client in enumerate(self.simulation.federation.clients) if len(client.labelled)}
        if self.o.labels == "some" and not labelled:
            raise UserError("warmup_rounds asks for the clients with labels, and of clients on nodes nobody knows", "use warmup_rounds=0")
        return set(range(self.o.clients)) if self.o.labels in ("clients", "all") else labelled

    def _requests(self) -> list[Request]:
        """What each of the round's clients is sent."""
        server, requests = self.server, []
        made: list[tuple[State, State]] = []  # statistics are made once for each model sent
        for position, client in enumerate(list(server.active)):
            with at("down", self.kit, server.round, client):
                message = self.method.down(server, client)
            message = {k: self._for_use(v, made) for k, v in message.items()}
            if self._travelling and position < len(server.entries.get("optimizers", [])):
                message |= {f"{n}/optimizer": t for n, t in server["optimizers"][position].items()}
            requests.append(Request(client, server.round, message))
        return requests

    def _beside(self, turn: str) -> list[Job]:
        """The server's own work while the clients are at theirs."""
        return [self._server_job(replica=i) for i in range(self.method.averager.replicas)] if turn == "beside" else []

    def _server_job(self, turn: int = 0, replica: int = 0) -> Job:
        entries, party = self.server.entries, SERVER - replica
        message = {k: v for k, v in entries.items() if isinstance(v, State | torch.Tensor)}
        return Job(party, self.server.round, message, turn, dict(entries.get(_record(party), {})))

    def _turn(self, tally: Tally, again: bool = False) -> None:
        """The server trains on its own data; its update's entries are written back."""
        with self._phase("server"):
            outcome = self.executor.run([self._server_job(int(again))])[0]
            self._check([outcome], tally)
            self._keep_server(outcome)
            for name, value in outcome.update.entries.items() if outcome.update else ():
                self.server[name] = value

    def _keep_server(self, outcome: Outcome) -> None:
        if outcome.record:
            name = _record(outcome.party)
            self.server[name] = dict(self.server.entries.get(name, {})) | outcome.record

    @property
    def _travelling(self) -> bool:
        nets = [spec for spec in self.kit.held.values() if isinstance(spec, Net) and spec.train]
        return any((spec.optimizer or self.o.optimizer_state) == "travel" for spec in nets)

    def _check(self, replies: Sequence[Reply], tally: Tally) -> None:
        tally.add(r.logs for r in replies)
        tally.add_rates((r.lr, r.steps) for r in replies)
        verdicts = self._read(r.finite for r in replies)
        bad = [r.party for r, finite in zip(replies, verdicts) if not finite]
        if bad:
            raise self._diverged("the weights of the server" if bad[0] <= SERVER else f"the weights of client {bad[0]}", at_server=False)

    def _read(self, verdicts: Iterable[Tensor]) -> list[bool]:
        """All of them at once: the device is waited for once."""
        found = [v.to(self.kit.device) for v in verdicts]
        return torch.stack(found).tolist() if found else []

    def _judge(self, where: str, *things: Any) -> None:
        """Asks the device whether what was made there is sound; the answer is read at the round's end."""
        self._verdicts.append((where, sound(*things)))

    def _refuse_unsound(self) -> None:
        """Reads this round's verdicts, all at once."""
        answers = self._read(verdict for _, verdict in self._verdicts)
        bad = [where for (where, _), good in zip(self._verdicts, answers) if not good]
        self._verdicts = []
        if bad:
            raise self._diverged(f"the numbers of {bad[0]}")

    def _diverged(self, what: str, at_server: bool = True) -> UserError:
        server_lr, momentum = (at_server and self.o.server_lr > 1), (at_server and self.o.server_momentum > 0)
        remedy = f"lower {'server_lr' if server_lr else 'lr'}{' or server_momentum' if momentum else ''}{'' if server_lr else ', or set clip=1'}"
        return UserError(f"{what} became NaN or infinite in round {self.server.round + 1}", f"{remedy}; the rounds before it are kept")

    def no_prediction(self, of: str = "of the test set") -> UserError:
        self._refuse_unsound()  # the cause, if it is known
        return self._diverged(f"the logits {of}")

    def _updates(self, replies: Sequence[Reply | None], own: Sequence[Reply]) -> Updates:
        """Updates in order of party id, the server's first, with their weights."""
        server, updates = self.server, Updates()
        if self._travelling:  # a client that made no step, or did not reply, leaves what its place has
            before = [*server.entries.get("optimizers", ()), *({} for _ in server.active)][: len(server.active)]
            found = [{} if r is None else r.optimizers for r in replies]
            server["optimizers"] = [new or old for new, old in zip(found, before, strict=True)]
        clients = sorted((r for r in replies if r is not None), key=lambda r: r.party)
        for reply in (*own, *clients):
            if reply.update is not None:
                reply.update.weight, reply.update.round = self._weight(reply), reply.round
                updates.append(reply.update)
        if updates.server and self.o.weights == "half":
            updates.server.weight = float(max(1, len(updates.clients)))
        updates[:] = [u for u in updates if u.weight > 0]
        if self.server_trains:
            self.kit.policy.merge(updates, server.sent or server.model)
        return updates

    def _weight(self, reply: Reply) -> float:
        counts = {"samples": reply.samples.all, "labelled": reply.samples.labelled}
        return float(counts.get(self.o.weights, 1))

    def model(self, state: State | None = None) -> State:
        """The server's model, or another, as it is to be used."""
        return self._for_use(self.server.model if state is None else state)

    # -- statistics, evaluation, metrics -------------------------------------------------------------------------------
    def _for_use(self, thing: Any, made: list[tuple[State, State]] | None = None) -> Any:
        """A model with statistics made for it where the policy makes them; anything else as it is."""
        if not self.kit.policy.lacks(thing, self._inference.layout):
            return thing
        made = [] if made is None else made  # holds the models themselves: the id of one that is gone may be another's
        known = next((whole for model, whole in made if model is thing), None)
        if known is None:
            known = static(self.simulation, self._inference, thing, self.server.round, self.server.active, self.clients.ask)
            self._judge("the static statistics", known)
            made.append((thing, known))
        return known

    def _evaluated(self, number: int, last: bool) -> dict[str, Any]:
        if (number + 1) % self.o.eval_every and not last:
            return dict.fromkeys(columns(self))
        with self._phase("statistics"):
            self.server["model"] = self._for_use(self.server.model)
        with self._phase("test"):
            return self.evaluate(self.server.model) | self.validation.test(number + 1, self.server.model)

    @torch.no_grad()
    def test_logits(self, state: State) -> torch.Tensor:
        """Logits of the whole test set, in file order; those of the model last tested are still there."""
        if self._tested is None or self._tested[0] is not state:
            logits = self.logits(state, self.simulation.test_batch, len(self.simulation.test_labels))
            if torch.isnan(logits).any():
                raise self.no_prediction()  # the largest of them is no class
            self._tested = state, logits
        return self._tested[1]

    @torch.no_grad()
    def logits(self, state: State, images: Callable[[int, int], torch.Tensor], count: int) -> torch.Tensor:
        """Of so many images, which are made batch by batch."""
        kit = self.kit
        self._inference.load(state)
        fixed = self.o.eval_batch if kit.device.type == "cpu" or not kit.policy.has_running else max(self.o.eval_batch, LARGE)
        call = self._inference.replayed("running")
        return over_ranges(kit, lambda a, b: call(images(a, b)).clone(), count, fixed)

    def evaluate(self, state: State) -> dict[str, float | None]:
        """Accuracy, loss and the cheap ones of the scores on the whole test set."""
        self._tested = None
        logits, labels = self.test_logits(state), self.simulation.test_labels
        right = (logits.argmax(1) == labels).double().mean()
        loss = float(F.cross_entropy(logits.double(), labels))
        if math.isnan(loss):
            raise self.no_prediction()
        return {"accuracy": float(right), "test_loss": loss} | scores.brief(logits, labels)

    def _metrics(self, requests: list[Request], replies: list[Reply], updates: Updates, tally: Tally) -> dict[str, Any]:
        means = tally.columns()
        row: dict[str, Any] = {k: means.pop(k, None) for k in ("loss", "label_ratio", "label_accuracy", "label_accuracy_all")}
        row["bytes_up"] = sum(size(u.entries) for u in updates.clients)
        sent = [r.message for r in requests]
        row["bytes_down"] = sum(size(v) for m in sent for k, v in m.items() if not k.endswith("/optimizer"))
        if self._travelling:
            row["optimizer_bytes_up"] = size(self.server["optimizers"])
            row["optimizer_bytes_down"] = sum(size(v) for m in sent for k, v in m.items() if k.endswith("/optimizer"))
        row["lr"] = mean_rate(*tally.rates)
        row["clients"] = len(updates.clients)
        row |= idle(self.kit.held, replies, first=not self.server.round and is_own(self.o.method))
        if not self.server.round and self._outside is not None and (found := outside.changed(self._outside, outside.kept(self.method))):
            row["outside"] = found
        row["client_steps"] = sum(steps) / len(steps) if (steps := [r.steps for r in replies if r.party > SERVER]) else None
        return row | means | self.server.logs | {"seconds": {k: round(v, 4) for k, v in self.seconds.items()}}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.kit.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def idle(held: dict[str, Any], replies: list[Reply], first: bool) -> dict[str, Any]:
    """Columns of what a method leaves lying: steps that train nothing; in the first round of one's own, held things not used."""
    made = [r for r in replies if r.steps]
    out: dict[str, Any] = {} if not made or any(r.descended for r in made) else {"descended": False}
    unused = sorted(set(held) - {"model"}.union(*(r.looked_at for r in replies)))
    return out | {"unused": unused} if first and made and unused else out


def versions(entries: dict[str, Any]) -> Versions:
    """How often each tensor of these has been written to; no device is asked."""
    found: Versions = {}
    for name, value in entries.items():
        tensors = value.groups.values() if isinstance(value, State) else [value] if isinstance(value, Tensor) else []
        found |= {id(t): (name, t._version) for t in tensors if not t.is_inference()}
    return found


def _record(server: int) -> str:
    """The name under which the server, or a replica of it, keeps what it keeps."""
    return "record" if server == SERVER else f"record/{SERVER - server}"
