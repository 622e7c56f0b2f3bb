"""A net as a method sees it: called with views, its weights one flat tensor at a fixed address."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fallow.engine.memory import out_of_memory
from fallow.engine.policies import AVERAGE, Policy
from fallow.engine.replay import Pool, Replayed
from fallow.errors import UserError, first_line
from fallow.methods.interface import Stats
from fallow.methods.state import HEAVY, Layout, State, is_plain, padding
from fallow.models.heads import head_of
from fallow.models.norms import adopt

Rows = Sequence[Tensor | None]
VARIANTS = 64  # of passes (shapes, parts, statistics) that are compiled; torch would stop at 8


def forward(module: nn.Module, weights: dict[str, Tensor] | None, x: Tensor, **how: bool) -> Any:
    return module(x, **how) if weights is None else torch.func.functional_call(module, weights, (x,), how)


@cache
def compiler() -> Any:
    """One compiled function for all nets: what it is made for depends on shapes and modes, not on whose weights they are."""
    torch._dynamo.config.recompile_limit = VARIANTS
    return torch.compile(forward)


def compiled(module: nn.Module, weights: dict[str, Tensor] | None, x: Tensor) -> Tensor:
    try:
        return compiler()(module, weights, x)
    except torch._dynamo.exc.TorchDynamoException as e:
        if out_of_memory(e):
            raise
        raise UserError(f"torch.compile failed ({first_line(e)})", "use compile=false") from e


def _is_like(tensor: Any, like: Tensor | None) -> bool:
    if not is_plain(tensor) or tensor.is_complex():
        return False
    return like is None or (tensor.shape == like.shape and tensor.is_floating_point() == like.is_floating_point())


def _plainly_trained(layer: nn.Module) -> bool:
    """Whether torch's own `train` does no more with it than to set a flag."""
    kind = type(layer)
    return kind.train is nn.Module.train and kind.__setattr__ is nn.Module.__setattr__ and "training" in vars(layer)


class NetHandle:
    """Holds a module whose tensors are views of three flat ones, and calls it."""

    def __init__(self, module: nn.Module, device: torch.device, policy: Policy = AVERAGE, autocast: Any = None):
        self.modes = adopt(module)
        self.module = module.to(device)
        self._training: bool | None = None  # what the module was last told
        modules = list(self.module.modules())
        self._layers = modules if all(map(_plainly_trained, modules)) else []
        self.capture = True  # false: inference is never captured
        self.compile = False  # through torch.compile, which cannot differentiate twice
        self.modes.updates_running, self.modes.has_running = policy.updates_running, policy.has_running
        self.modes.key = torch.zeros((), dtype=torch.int64, device=device)
        self.layout = Layout.of(self.module)
        self.flat = State.of(self.module, self.layout)
        self._autocast = autocast
        self._bind()
        self.names = self.layout.names("parameters")
        named = dict(self.module.named_parameters())
        self.params: list[nn.Parameter] = [named[n] for n in self.names]  # type: ignore[list-item]
        self._replayed: dict[tuple[str, int | None], Replayed] = {}
        self.calls: list[list[Tensor]] = []  # the bf16 weights each call of this step was made with
        self._halve(autocast is not None)

    def _halve(self, wanted: bool) -> None:
        """Under autocast, one bf16 copy of all convolutions' and linear layers' weights, cast in one piece.

        The same numbers as autocast's own casts, one kernel instead of one per layer and call.
        """
        heavy = {id(p) for m in self.module.modules() if isinstance(m, HEAVY) for p in m.parameters(recurse=False)}
        self._cast = sum(id(p) in heavy for p in self.params) if wanted else 0
        entries = [e for e in self.layout.entries if e.group == "parameters"][: self._cast]
        size = sum(p.numel() + padding(p) for p in self.params[: self._cast])
        self._half = torch.zeros(size, dtype=torch.bfloat16, device=self.modes.key.device)
        self._halves = [e.view(self._half) for e in entries]
        self.touched()

    def touched(self) -> None:
        """The weights have changed: a bf16 copy of them is out of date."""
        self._stale = True

    def begin_step(self) -> None:
        self.modes.begin_step()
        self.calls.clear()
        self.touched()

    def _weights_for_call(self) -> dict[str, Tensor] | None:
        if not self._cast:
            return None
        if self._stale:
            with torch.no_grad():
                self._half.copy_(self.flat.groups["parameters"][: len(self._half)])
            self._stale = False
        halves = self._halves
        if torch.is_grad_enabled():
            halves = [h.detach().requires_grad_() for h in halves]  # an own leaf per call: gradients add up in float32
            self.calls.append(halves)
        return dict(zip(self.names, halves))

    def _bind(self) -> None:
        owners = {name: (m, leaf) for name, m, leaf in _places(self.module)}
        for entry in self.layout.entries:
            view = entry.view(self.flat.groups[entry.group])
            owner, leaf = owners[entry.name]
            if entry.group == "parameters":
                owner._parameters[leaf].data = view  # type: ignore[union-attr]
            else:
                owner._buffers[leaf] = view

    def strays(self) -> list[str]:
        """The tensors of the module that are no longer those of its State: it has put others in their places."""
        there = {name: getattr(owner, leaf) for name, owner, leaf in _places(self.module)}
        return [e.name for e in self.layout.entries if there[e.name].data_ptr() != e.view(self.flat.groups[e.group]).data_ptr()]

    # -- calling -----------------------------------------------------------------------------------------------------
    def __call__(
        self,
        x: Tensor,
        weights: Mapping[str, Tensor] | None = None,
        stats: str = "update",
        rows: Tensor | None = None,
        parts: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Logits, float32. Every call is a batch of its own for batch norm; `stats`: update, batch or running."""
        return self._call(x, weights, stats, rows, parts).float()

    def raw(self, x: Tensor, stats: str) -> Any:
        """What the module itself gives, whatever that is."""
        return self._call(x, stats=stats)

    def with_features(self, x: Tensor, stats: str = "update", rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits, and the features before the last layer, of one call."""
        if "features" not in inspect.signature(self.module.forward).parameters:
            kind = type(self.module).__name__
            raise UserError(f"the method wants the features that {kind} makes its logits of", f"give {kind} a forward(x, features=False) that returns both if asked")
        z, h = self._call(x, stats=stats, rows=rows, features=True)
        return z.float(), h.float()

    def _call(
        self, x: Tensor, weights: Mapping[str, Tensor] | None = None, stats: str = "update", rows: Tensor | None = None,
        parts: tuple[int, ...] | None = None, **how: bool,
    ) -> Any:  # fmt: skip
        if stats not in get_args(Stats):
            raise UserError(f"a net is called with stats={stats!r}", f"give {', '.join(get_args(Stats))}")
        self.modes.stats, self.modes.rows, self.modes.parts = stats, rows, parts  # type: ignore[assignment]
        self._train(stats != "running")
        with self._autocast() if self._autocast else nullcontext():
            given = self._weights_for_call() if weights is None else dict(weights)
            if self.compile and weights is None and not how:
                return compiled(self.module, given, x)
            return forward(self.module, given, x, **how)

    def _train(self, wanted: bool) -> None:
        """For layers of one's own that ask `self.training`; those adopted ask `modes`. Set for whole nets, by any thread."""
        if self._training is wanted:
            return
        self._training = wanted
        if not self._layers:
            self.module.train(wanted)
        for layer in self._layers:  # as `train` does, which looks for them each time
            vars(layer)["training"] = wanted

    def replayed(self, stats: str, part: int | None = None, pool: Pool | None = None, most: int | None = None) -> Replayed:
        """This net as a function of images alone, captured on CUDA; for inference, without gradients.

        With `part`, so many images are a batch of their own for batch norm; `pool` and `most` as the first caller has them.
        """
        if (stats, part) not in self._replayed:

            @torch.no_grad()
            def call(x: Tensor) -> Tensor:
                self.touched()  # the cast of the weights belongs into the graph
                sizes = part and tuple(min(part, len(x) - start) for start in range(0, len(x), part))
                return self(x, stats=stats, parts=sizes or None)

            self._replayed[stats, part] = Replayed(call, pool, most, self.capture)
        return self._replayed[stats, part]

    def together(self, *parts: Tensor | None, stats: str = "update", rows: Rows = ()) -> list[Tensor | None]:
        """One call on the concatenation; an absent part stays None. `rows` has a mask, or None, per part."""
        return self._joined(parts, stats, rows, apart=False)

    def together_with_features(self, *parts: Tensor | None, stats: str = "update", rows: Rows = ()) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The same: logits, and the features that they were made of."""
        z, h = self.with_features(torch.cat([p for p in parts if p is not None]), stats, _mask(parts, rows))
        return _split(z, parts), _split(h, parts)

    def apart(self, *parts: Tensor | None, stats: str = "update", rows: Rows = ()) -> list[Tensor | None]:
        """The same, but each part is a batch of its own for batch norm."""
        return self._joined(parts, stats, rows, apart=True)

    def _joined(self, parts: Sequence[Tensor | None], stats: str, rows: Rows, apart: bool) -> list[Tensor | None]:
        present = [p for p in parts if p is not None]
        sizes = tuple(len(p) for p in present) if apart else None
        return _split(self(torch.cat(present), stats=stats, parts=sizes, rows=_mask(parts, rows)), parts)

    # -- weights -----------------------------------------------------------------------------------------------------
    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    @property
    def head(self) -> str:
        """The name of the last layer's weight."""
        return head_of(self.module)

    @property
    def state(self) -> State:
        """What travels: parameters, and running statistics where they are tracked. Live: the engine copies it."""
        return self.flat if self.modes.updates_running else self.flat.only("parameters")

    @torch.no_grad()
    def load(self, state: State) -> None:
        self._check(state)
        for group, tensor in state.groups.items():
            if group in self.flat.groups:
                self.flat.groups[group].copy_(tensor)
        self.touched()

    def _check(self, state: Any) -> None:
        """What is no State of this net would be broadcast to its weights, and that of another net fill them wrongly."""
        if not isinstance(state, State):
            what = "nothing" if state is None else f"a {type(state).__name__}"
        elif state.layout != self.layout:
            what = "a State of another net"
        else:
            odd = [group for group, tensor in state.groups.items() if not _is_like(tensor, self.flat.groups.get(group))]
            if not odd:
                return
            what = f"a State whose {odd[0]} are no plain tensor of real numbers, of the same length"
        raise UserError(f"a net is given {what}", "give it a State of its own kind, such as server.model or party.received['model']")

    @torch.no_grad()
    def follow(self, other: NetHandle, decay: float | Tensor) -> None:
        """EMA: self <- decay * self + (1 - decay) * other; statistics are copied."""
        for group, mine in self.flat.groups.items():
            theirs = other.flat.groups[group]
            mine.lerp_(theirs, 1 - decay) if group == "parameters" else mine.copy_(theirs)
        self.touched()

    @property
    def leaves(self) -> list[Tensor]:
        """What a gradient is taken for: the parameters, and the bf16 weights of this step's calls."""
        return [*self.params, *(half for call in self.calls for half in call)]

    def combine(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients for the leaves as one per parameter, float32; an unused parameter has gradient 0."""
        out: list[Tensor | None] = list(grads[: len(self.params)])
        for call in range(len(self.calls)):
            start = len(self.params) + call * self._cast
            for i, g in enumerate(grads[start : start + self._cast]):
                if g is not None:
                    old = out[i]
                    out[i] = g.float() if old is None else old + g.float()
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, out)]

    def pieces(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor | None]:
        """Gradients for the leaves as flat tensors: of the bf16 weights one per call, of all other parameters one."""
        n, cast = len(self.params), self._cast
        groups = [grads[:cast], *(grads[n + c * cast : n + (c + 1) * cast] for c in range(len(self.calls)))]
        used = [g for g in groups if any(x is not None for x in g)] or groups[:1]
        heavy = [_flat(g, self.params[:cast]) for g in used] if cast else []
        return heavy, _flat(grads[cast:n], self.params[cast:]) if cast < n else None

    @staticmethod
    def flatten(heavy: Sequence[Tensor], rest: Tensor | None) -> Tensor:
        """The pieces as one flat float32 tensor in the parameters' order."""
        wide = [h.float() if h.dtype == torch.bfloat16 else h for h in heavy]
        parts = ([sum(wide[1:], wide[0])] if wide else []) + ([] if rest is None else [rest])
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _mask(parts: Sequence[Tensor | None], rows: Rows) -> Tensor | None:
    """The masks of the parts that are there as one; None if none has any."""
    if all(r is None for r in rows):
        return None
    kept = [(p, r) for p, r in zip(parts, rows) if p is not None]
    return torch.cat([torch.ones(len(p), dtype=torch.bool, device=p.device) if r is None else r for p, r in kept])


def _split(whole: Tensor, parts: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What was made of the concatenation, part by part."""
    out = iter(whole.split([len(p) for p in parts if p is not None]))
    return [None if p is None else next(out) for p in parts]


def _flat(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Gradients one behind the other, gaps and missing ones filled from one tensor of zeros."""
    first = next((g for g in grads if g is not None), like[0])
    missing = max(padding(p) + (p.numel() if g is None else 0) for p, g in zip(like, grads))
    zeros, pieces = first.new_zeros(missing), []
    for p, g in zip(like, grads):
        if g is None:
            pieces.append(zeros[: p.numel() + padding(p)])
            continue
        pieces.append((g.permute(0, 2, 3, 1) if g.dim() == 4 else g).reshape(-1))
        if gap := padding(p):
            pieces.append(zeros[:gap].to(g.dtype))
    mixed = len({x.dtype for x in pieces}) > 1
    return torch.cat([x.float() for x in pieces] if mixed else pieces)


def _places(module: nn.Module) -> Any:
    for prefix, sub in module.named_modules():
        for leaf in [*sub._parameters, *sub._buffers]:
            yield (f"{prefix}.{leaf}" if prefix else leaf), sub, leaf
