"""Capturing on CUDA: graphs and the memory they share, and inference that is captured per recurring shape."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fallow.engine.memory import out_of_memory
from fallow.errors import first_line

log = logging.getLogger(__name__)

CAPTURE_AT = 3  # uses of a step's signature or of a prediction's shape


@cache
def complain(what: str, why: str) -> None:
    """Once a run, however many slots it happens in."""
    log.warning("%s cannot be captured (%s); going on eagerly, which is slower", what, why)


class Pool:
    """Memory for graphs that never run at once."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched on the current stream becomes the graph; nothing is carried out."""
        torch.cuda.current_stream().synchronize()
        collecting = gc.isenabled()
        gc.disable()  # a tensor freed by the collector in the middle of a capture would spoil it
        try:
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
        except BaseException:
            self._abandon()
            raise
        finally:
            if collecting:
                gc.enable()

    def _abandon(self) -> None:
        """After a spoilt capture torch may hold the memory to be still in use by it, and refuse to empty its cache."""
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.handle)
        self.handle = torch.cuda.graph_pool_handle()


class Replayed:
    """Calls `function(x)`. On CUDA a shape's third call is captured; what cannot be captured is called as it is.

    The result lies in a buffer until the next replay of a graph of the same `pool` (by default its own graphs only).
    At most `most` shapes are captured. Out of memory is for the slot whose pool it is; without one it is one more reason
    to call.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        pool: Pool | None = None,
        most: int | None = None,
        enabled: bool = True,
    ):
        self.function, self.pool, self.most, self.enabled = function, pool, most, enabled
        self.of_slot = pool is not None
        self._uses: dict[Any, int] = {}
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._stream: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (self.enabled and x.is_cuda):
            return self.function(x)
        shape = (tuple(x.shape), x.dtype)
        if shape in self._graphs:
            graph, source, out = self._graphs[shape]
            source.copy_(x)
            graph.replay()
            return out
        self._uses[shape] = self._uses.get(shape, 0) + 1
        if self._uses[shape] < CAPTURE_AT or len(self._graphs) == self.most:
            return self.function(x)
        try:
            self._graphs[shape] = self._capture(x)
        except RuntimeError as e:
            if self.of_slot and out_of_memory(e):
                raise
            self.enabled = False
            self._graphs.clear()
            complain("inference", first_line(e))
        return self(x)

    def _capture(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """On the current stream, or on an own one in place of the default, which cannot be captured."""
        self.pool = self.pool or Pool()
        source = x.clone(memory_format=torch.preserve_format)
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        if stream == torch.cuda.default_stream():
            stream.synchronize()
            stream = self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(stream), self.pool.capturing(graph):
            out = self.function(source)
        return graph, source, out
