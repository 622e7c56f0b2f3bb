"""Shares a round's parties among processes: `torchrun --nproc-per-node N -m fallow run ...`.

Rank 0 is the server and the only one that knows the run's folder. It deals the jobs by planned work, sends each rank
its own (message, record) and puts the outcomes back in the order of the jobs, so what is merged, and in which order,
does not depend on the number of ranks. Everything travels through host memory over gloo, between GPUs too: a round
moves a few MB per client, once.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from io import BytesIO
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fallow.engine.clients import SERVER, Executor, Samples
from fallow.engine.kit import Kit
from fallow.engine.pack import pack, unpack
from fallow.engine.party import Job, Outcome, sent_by
from fallow.engine.simulation import Simulation
from fallow.errors import UserError, first_line
from fallow.launched import Misplaced, meeting_place
from fallow.methods.base import Update
from fallow.methods.state import Layout

PATIENCE = timedelta(hours=6)  # a dead process is noticed at once, a silent one by its missing beats; this is the last resort
BEAT = 1.0  # seconds between a rank's signs of life, and between looks at them
SILENCE = 60.0  # seconds after which a rank without them is named
JOINING = 300.0  # for the others to come where ranks meet
PREPARING = 600.0  # after which rank 0 is given up that has not told the run's settings yet
Tree = dict[str, Any]
Layouts = dict[str, Layout]
T = TypeVar("T")


class RankLost(UserError):
    """Another process of the run has ended, or is silent."""

    def __init__(self, cause: str, rank: int | None = None):
        kept = "its last checkpoint is kept, go on with `fallow resume`"
        super().__init__(cause, kept if rank == 0 else "its own message, if it left one, is above")
        self.unspoken = rank == 0  # who speaks for all is silent himself


class RankFailed(Exception):
    """A mistake showed on another rank, whose traceback this is."""


def join() -> None:
    """Meets the other processes. Who is not there yet is not waited for as long as who works."""
    (host, port), told = meeting_place(), "give every process the MASTER_ADDR and MASTER_PORT of rank 0's machine, and a WORLD_SIZE of as many as there are"
    try:
        socket.getaddrinfo(host, port)
        store, rank, processes = next(rendezvous("env://", timeout=timedelta(seconds=JOINING)))
        store.set_timeout(timedelta(seconds=JOINING))
        dist.init_process_group("gloo", store=dist.PrefixStore("default_pg", store), rank=rank, world_size=processes, timeout=PATIENCE)
        store.set_timeout(PATIENCE)
    except (OSError, UnicodeError, RuntimeError) as e:  # torch's words for a network are RuntimeErrors
        raise Misplaced(f"the processes of this run do not meet at {host}:{port} ({first_line(e)})", told) from e


# -- the exchange ------------------------------------------------------------------------------------------------------
class Post:
    """Carries trees of States, tensors and plain values between rank 0 and the others."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if not dist.is_initialized():
            join()
        self.group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=PATIENCE)
        self.others = range(1, dist.get_world_size())
        self.open = True  # false while answers are awaited, and for good once that has failed
        self.waiting: set[int] = set()  # ranks whose answers are still to come
        self._store = dist.distributed_c10d._get_default_store()
        self._show_life(f"fallow/{dist.get_rank()}")

    def send(self, tree: Tree, rank: int, layouts: Layouts) -> None:
        data = encoded(tree, layouts)
        self._carry(rank, lambda: dist.send(torch.tensor([len(data)]), rank, group=self.group))
        self._carry(rank, lambda: dist.send(data, rank, group=self.group))

    def receive(self, rank: int) -> Tensor:
        """What was sent, still as bytes."""
        length = torch.zeros(1, dtype=torch.int64)
        self._carry(rank, lambda: dist.recv(length, rank, group=self.group))
        data = torch.empty(int(length), dtype=torch.uint8)
        self._carry(rank, lambda: dist.recv(data, rank, group=self.group))
        return data

    def ask(self, orders: dict[int, Tree], layouts: Layouts) -> Future[dict[int, Tensor]]:
        """Sends orders and awaits the answers on a thread of its own: Ctrl-C cannot interrupt a wait inside gloo."""
        self.open, self.waiting = False, set(orders)

        def exchange() -> dict[int, Tensor]:
            for rank, order in orders.items():
                self.send(order, rank, layouts)
            found: dict[int, Tensor] = {}
            for rank in orders:
                found[rank] = self.receive(rank)
                self.waiting.discard(rank)
            self.open = True
            return found

        return _beside(exchange)

    def order(self, timeout: float) -> Tensor:
        """What rank 0 wants next."""
        self.waiting = {0}
        return self.await_answers(_beside(lambda: self.receive(0)), timeout)

    def answer(self, tree: Tree, layouts: Layouts, timeout: float) -> None:
        """To rank 0, as soon as it takes it."""
        self.waiting = {0}
        self.await_answers(_beside(lambda: self.send(tree, 0, layouts)), timeout)

    def await_answers(self, asked: Future[T], timeout: float) -> T:
        """What was asked for; a rank that gives no sign of life meanwhile is named, and after `timeout` seconds given up."""
        watched = Watched(timeout)
        while True:
            try:
                return asked.result(timeout=BEAT)
            except TimeoutError:
                if asked.done():
                    return asked.result()
                watched.look({rank: self.beats(rank) for rank in sorted(self.waiting)})

    def beats(self, rank: int) -> int:
        """How many signs of life a rank has given."""
        return self._store.add(f"fallow/{rank}", 0)

    def _show_life(self, name: str) -> None:
        ended = Event()

        def beat() -> None:
            while not ended.wait(BEAT):
                try:
                    self._store.add(name, 1)
                except Exception:  # whoever kept the count has ended
                    return

        def end() -> None:
            ended.set()
            thread.join(2 * BEAT)

        thread = Thread(target=beat, name="fallow-beats", daemon=True)
        thread.start()
        atexit.register(end)  # a thread must not be inside the store while Python ends

    def dismiss(self, path: str | None) -> None:
        """Sends the other ranks home with the folder of the finished run, None if it failed.

        Ranks that are still at work then see rank 0 end.
        """
        if self.open:
            for rank in self.others:
                self.send({"do": "stop", "path": path}, rank, {})

    @staticmethod
    def _carry(rank: int, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError:  # gloo's word for a closed connection
            raise RankLost(f"rank {rank} has ended before the run was done") from None


def _beside(exchange: Callable[[], T]) -> Future[T]:
    """An exchange on a thread of its own."""
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(exchange())
        except BaseException as e:
            found.set_exception(e)

    Thread(target=work, name="fallow-ranks", daemon=True).start()
    return found


class Watched:
    """For how long ranks have given no sign of life: by looks, so that time in which all were stopped does not count."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._last: dict[int, tuple[int, float]] = {}
        self._named: set[int] = set()

    def look(self, beats: dict[int, int]) -> None:
        for rank, count in beats.items():
            before, silent = self._last.get(rank, (count, 0.0))
            silent = silent + BEAT if before == count else 0.0
            self._last[rank] = (count, silent)
            if silent >= self.timeout:
                raise RankLost(f"rank {rank} has been silent for {silent:g} s and was given up (rank_timeout={self.timeout:g})", rank)
            if silent >= SILENCE and rank not in self._named:
                self._named.add(rank)
                print(f"waiting for rank {rank}, silent for {silent:g} s; after {self.timeout:g} s (rank_timeout) it is given up", file=sys.stderr, flush=True)


@cache
def post() -> Post:
    """One for the process; it outlives a run."""
    return Post()


def encoded(tree: Tree, layouts: Layouts) -> Tensor:
    """A tree as bytes; a tensor that occurs often, such as the model sent to all clients, is written once."""
    shape, tensors = pack(tree, layouts)
    host = {id(t): t.detach().cpu() for t in tensors.values()}
    buffer = BytesIO()
    torch.save((shape, {path: host[id(t)] for path, t in tensors.items()}), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def decoded(data: Tensor, layouts: Layouts, device: torch.device) -> Tree:
    shape, tensors = torch.load(BytesIO(data.numpy().data), map_location=device, weights_only=True)
    return unpack(shape, tensors, layouts, device)


# -- rank 0 ------------------------------------------------------------------------------------------------------------
class Ranks:
    """Carries out a round's jobs, a share of them here, the rest on the other ranks."""

    def __init__(self, simulation: Simulation, inner: Executor, begin: Tree):
        """`begin` tells the other ranks what they need to build the same simulation."""
        self.simulation, self.kit, self.inner, self.post = simulation, simulation.kit, inner, post()
        self.layouts = self.kit.layouts()
        self._begun: Future[dict[int, Tensor]] | None = self._ask({rank: {"do": "begin"} | begin for rank in self.post.others})

    def run(self, jobs: list[Job]) -> list[Outcome]:
        shares = deal([self._work(job) for job in jobs], 1 + len(self.post.others))
        if self._begun is not None:
            self._answers(self._begun)
            self._begun = None
        orders = {rank: {"do": "run", "jobs": [vars(jobs[k]) for k in share]} for rank, share in enumerate(shares) if rank and share}
        asked = self._ask(orders) if orders else None
        outcomes = dict(zip(shares[0], self.inner.run([jobs[k] for k in shares[0]]))) if shares[0] else {}
        for rank, answer in self._answers(asked).items() if asked else ():
            outcomes |= zip(shares[rank], map(_from_tree, answer["outcomes"]))
        return [outcomes[k] for k in range(len(jobs))]

    def shrink(self) -> None:
        self.inner.shrink()

    def _ask(self, orders: dict[int, Tree]) -> Future[dict[int, Tensor]]:
        return self.post.ask(orders, self.layouts)

    def _answers(self, asked: Future[dict[int, Tensor]]) -> dict[int, Tree]:
        """Brought to the device only now, when everything has come and the slots here have no more to do."""
        answers = {rank: decoded(data, self.layouts, self.kit.device) for rank, data in self._arrived(asked).items()}
        for rank, answer in answers.items():
            if "bug" in answer:
                raise RankFailed(f"on rank {rank}:\n{answer['bug']}")
            if "error" in answer:
                cause, remedy = answer["error"]
                raise UserError(f"on rank {rank}, {cause}", remedy)
        return answers

    def _arrived(self, asked: Future[dict[int, Tensor]]) -> dict[int, Tensor]:
        return asked.result() if asked.done() else self.post.await_answers(asked, self.kit.options.rank_timeout)

    def _work(self, job: Job) -> float:
        """How many images a party is likely to train on."""
        o, f = self.kit.options, self.simulation.federation
        steps, epochs, batch = o.steps, o.epochs, o.batch
        if job.party <= SERVER:
            steps = o.server_steps or (None if o.server_epochs else steps)
            epochs, batch = o.server_epochs or epochs, o.server_batch or batch
        if isinstance(steps, int) and isinstance(batch, int):
            return steps * batch
        holding = f.server if job.party <= SERVER else f.clients[job.party]
        return (epochs or 1) * (len(holding.labelled) + len(holding.unlabelled))


def deal(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Positions by rank: the largest first, each to the rank that has least to do so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for position in sorted(range(len(work)), key=lambda k: -work[k]):
        rank = load.index(min(load))
        shares[rank].append(position)
        load[rank] += work[position] + 1
    return [sorted(share) for share in shares]


def _from_tree(tree: Tree) -> Outcome:
    entries, samples = tree.pop("update"), Samples(**tree.pop("samples"))
    outcome = Outcome(update=None if entries is None else Update(entries), samples=samples, **tree)
    if outcome.update is not None:
        sent_by(outcome.update, outcome.party)
    return outcome


# -- the other ranks ---------------------------------------------------------------------------------------------------
def serve(build: Callable[[Tree], tuple[Kit, Executor]]) -> str:
    """Does what rank 0 asks until it says stop; the run's folder. What fails here is told there."""
    office, device, executor = post(), torch.device("cpu"), None
    layouts: Layouts = {}
    timeout = PREPARING
    while True:
        order = decoded(office.order(timeout), layouts, device)
        if order["do"] == "stop":
            if order["path"] is None:
                raise RankLost("rank 0 has ended the run")
            return order["path"]
        answer: Tree = {}
        try:
            if order["do"] == "begin":
                kit, executor = build(order)
                layouts, device, timeout = kit.layouts(), kit.device, kit.options.rank_timeout
            else:
                assert executor is not None
                answer["outcomes"] = [_as_tree(o) for o in executor.run([Job(**j) for j in order["jobs"]])]
        except UserError as e:
            answer["error"] = [e.cause, e.remedy]
        except Exception:
            answer["bug"] = traceback.format_exc()
        office.answer(answer, layouts, timeout)


def _as_tree(outcome: Outcome) -> Tree:
    entries = None if outcome.update is None else outcome.update.entries
    return vars(outcome) | {"update": entries, "samples": vars(outcome.samples)}
