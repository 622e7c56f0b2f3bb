"""Inference on CUDA: a function of one tensor, captured per recurring shape and replayed; elsewhere just called."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Replayed:
    """Calls `function(x)`. On CUDA a shape's third call is captured; what cannot be captured is called as it is.

    The result lies in a buffer until the next replay of a graph of the same `pool` (by default its own graphs only).
    At most `most` shapes are captured.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], pool: Any = None, most: int | None = None):
        self.function, self.pool, self.most = function, pool, most
        self.enabled = True
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
        if self._uses[shape] < 3 or len(self._graphs) == self.most:
            return self.function(x)
        try:
            self._graphs[shape] = self._capture(x)
        except RuntimeError as e:
            self.enabled = False
            self._graphs.clear()
            log.warning("inference cannot be captured (%s); going on eagerly, which is slower", str(e).splitlines()[0])
        return self(x)

    def _capture(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """On the current stream, or on an own one in place of the default, which cannot be captured."""
        source = x.clone(memory_format=torch.preserve_format)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = self._stream = self._stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    out = self.function(source)
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph, source, out
