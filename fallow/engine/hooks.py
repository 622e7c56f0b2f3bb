"""A method's hooks as the engine calls them: what fails in one says where, and what one gives can be looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from torch import Tensor

from fallow.engine.clients import SERVER
from fallow.engine.kit import Kit
from fallow.engine.pack import pack
from fallow.engine.strict import guarded
from fallow.errors import UserError
from fallow.methods.base import Method, Plan, State, Update
from fallow.methods.state import is_plain


class Wrong(UserError):
    """A hook did something that it should not."""

    def __init__(self, check: str, what: str):
        super().__init__(what, "docs/own-method.md says what each hook gives")
        self.check = check


class at:
    """What fails in here says in which hook, of whom and when: in a note; with backend=debug in a user's sentence, too.

    A class, since every step is made in one: a generator as context manager takes three times as long.
    """

    __slots__ = ("hook", "kit", "party", "round", "step")

    def __init__(self, hook: str, kit: Kit, round: int, party: int | None = None, step: int = 0):
        self.hook, self.kit, self.round, self.party, self.step = hook, kit, round, party, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, SystemExit) and not error.code:  # else it is a signal's word
            cause = f"`{self.hook}` of {self.kit.options.method} ends the process, and no round is over there"
            raise UserError(cause, "raise an exception, or return None") from error
        if isinstance(error, Exception):
            if self.kit.debug and isinstance(error, UserError):
                raise UserError(f"in {self._place()}: {error.cause}", error.remedy) from error
            error.add_note(f"in {self._place()}")

    def _place(self) -> str:
        whose = "" if self.party is None else "the server, " if self.party <= SERVER else f"client {self.party}, "
        return f"`{self.hook}` of {self.kit.options.method}, {whose}round {self.round + 1}" + (f", step {self.step}" if self.step else "")


# -- looking at what hooks give ----------------------------------------------------------------------------------------
def watched(kind: type[Method], strict: bool = False, closely: bool = True) -> type[Method]:
    """The method, with hooks whose answers are looked at; `strict`: `begin` may do nothing that cannot be captured.

    `closely`: at what only a close look shows, too: entries of another form than those that came, writing in place, devices.
    """
    hooks = {name: _looked_at(getattr(kind, name), look, strict, closely) for name, look in LOOKS.items()}
    return type(kind.__name__, (kind,), hooks | {"__module__": kind.__module__})


def _looked_at(hook: Callable[..., Any], look: Callable[[Any, Any, bool], None], strict: bool, closely: bool) -> Callable[..., Any]:
    name = hook.__name__

    @wraps(hook)
    def inner(self: Method, *args: Any) -> Any:
        before = _copied(args[0].entries) if closely and name in ("down", "merge") else []
        called = guarded(hook, copies=True) if name == "begin" and strict and self.captured else hook
        answer = called(self, *args)
        look(args[0], answer, closely)
        for entry, tensor, copy in before:
            if not tensor.equal(copy):
                raise Wrong("server", f"{name} changes server[{entry!r}] in place, which a round that fails could not take back")
        return answer

    return inner


def _start(server: Any, answer: Any, closely: bool) -> None:
    _lasting("start", server, closely)


def _down(server: Any, answer: Any, closely: bool) -> None:
    if not isinstance(answer, dict) or not answer:
        raise Wrong("hooks", f"down gives {_kind(answer)}, and not a dict of States and tensors")
    _entries("down", answer, server.kit, closely)


def _begin(party: Any, answer: Any, closely: bool) -> None:
    if not isinstance(answer, dict):
        raise Wrong("hooks", f"begin gives {_kind(answer)}, and not a dict ({{}} where there is nothing)")


def _plan(party: Any, answer: Any, closely: bool) -> None:
    if not isinstance(answer, Plan):
        raise Wrong("hooks", f"plan gives {_kind(answer)}, and not a Plan")


def _end(party: Any, answer: Any, closely: bool) -> None:
    if answer is not None and not isinstance(answer, Update):
        raise Wrong("hooks", f"end gives {_kind(answer)}, and not an Update, or None")
    entries = {} if answer is None else answer.entries
    _entries("end", entries, party.kit, closely)
    for name in entries.keys() & party.received.keys() if closely else ():
        up, down = _form(entries[name]), _form(party.received[name])
        if up != down:
            raise Wrong("hooks", f"end sends {name!r} as {up}, and received it as {down}")


def _merge(server: Any, answer: Any, closely: bool) -> None:
    _lasting("merge", server, closely)


LOOKS: dict[str, Callable[[Any, Any, bool], None]] = {"start": _start, "down": _down, "begin": _begin, "plan": _plan, "end": _end, "merge": _merge}


def _lasting(hook: str, server: Any, closely: bool) -> None:
    """What is tested, saved and sent next is a model of this run, with the statistics that its predictions need."""
    model = server.entries.get("model")
    if not isinstance(model, State):
        raise Wrong("hooks", f"{hook} leaves {_kind(model)} in server['model'], and not a State")
    pack([server.entries, server.pool.new], server.pool.layouts)  # refuses what no checkpoint holds
    _entries(hook, {"model": model}, server.kit, closely)
    needed = server.kit.policy.travels(server.kit.initial()).only("parameters", "statistics").groups
    for group in needed.keys() - model.groups.keys():
        raise Wrong("hooks", f"{hook} leaves a State without {group} in server['model']")


def _entries(hook: str, entries: dict[str, Any], kit: Kit, closely: bool) -> None:
    for name, value in entries.items():
        if not isinstance(name, str):
            raise Wrong("hooks", f"{hook} sends an entry by the name {name!r}, which is no text")
        if not isinstance(value, State | Tensor) and (closely or hook == "end" or name == "model"):
            raise Wrong("hooks", f"{hook} sends {_kind(value)} as {name!r}; States and tensors travel")
        if not all(map(is_plain, _tensors(value))):
            raise Wrong("hooks", f"{hook} sends {name!r} with numbers that are not all there: sparse, or on no device")
        if closely and any(t.device.type != kit.device.type for t in _tensors(value)):
            raise Wrong("hooks", f"{hook} sends {name!r} from another device than the run's")
        if name == "model" and isinstance(value, State) and value.layout != kit.initial().layout:
            raise Wrong("hooks", f"{hook} sends a State of another net as 'model'")


def _form(value: Any) -> str:
    """What must agree between an entry as it was sent down and as it comes up."""
    if isinstance(value, State):
        return f"a State of {sum(e.numel for e in value.layout.entries):,} numbers"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _kind(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _tensors(value: Any) -> list[Tensor]:
    return list(value.groups.values()) if isinstance(value, State) else [value] if isinstance(value, Tensor) else []


def _copied(entries: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    """The tensors among the server's entries, each with a copy."""
    return [(name, t, t.clone()) for name, value in entries.items() for t in _tensors(value)]
