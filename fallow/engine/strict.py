"""Torch modes that refuse what a captured step cannot have: host reads and copies, value-dependent shapes, random numbers.

They hold on the CPU, so a step that could not be captured on a GPU already fails on a laptop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fallow.engine.kit import Kit

HOST = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
SHAPES = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
RANDOM = {
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial",
    "native_dropout", "dropout", "feature_dropout", "alpha_dropout", "normal", "normal_", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "random", "random_", "randperm", "rrelu_with_noise", "uniform", "uniform_",
}  # fmt: skip
READS = {"tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__", "__complex__"}
BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class NotCapturable(AssertionError):
    pass


class _Dispatch(TorchDispatchMode):
    def __init__(self, copies: bool):
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in HOST:
            raise NotCapturable(f"{name} reads a value on the host")
        if name == "lift_fresh" and not self.copies:
            raise NotCapturable("a tensor of host values would be copied to the device")
        if name in SHAPES or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            raise NotCapturable(f"the shape of {name}'s result depends on values")
        if name in BY_MASK and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise NotCapturable(f"{name} with a mask has a shape that depends on values")
        if name in RANDOM:
            raise NotCapturable(f"{name} draws random numbers")
        return func(*args, **(kwargs or {}))


class _Function(TorchFunctionMode):
    """Reads that never reach the dispatcher on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and args and isinstance(args[0], Tensor):
            raise NotCapturable(f"{func.__name__} reads a value on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def strict(copies: bool = False) -> Iterator[None]:
    """Refuses, inside, whatever could not be captured; but for copies to the device, if these are to be had."""
    with ExitStack() as modes:
        modes.enter_context(_Function())
        modes.enter_context(_Dispatch(copies))
        yield


@contextmanager
def relaxed() -> Iterator[None]:
    """Suspends the modes: for the engine's own work inside a hook, which is not captured."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def outside(kit: Kit) -> Iterator[None]:
    """Inside, making views is not under the modes: it is the engine's work, and not captured."""
    made = kit.view

    def view(*args: Any) -> Tensor:
        with relaxed():
            return made(*args)

    vars(kit)["view"] = view
    try:
        yield
    finally:
        del vars(kit)["view"]


def guarded(function: Callable[..., Any], copies: bool = False) -> Callable[..., Any]:
    """The function, which may then do nothing that cannot be captured."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with strict(copies):
            return function(*args, **kwargs)

    return inner
