"""How often somebody looks for what has not come."""

from __future__ import annotations

import inspect
import time
from functools import partial
from itertools import pairwise

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from fallow.flower import supernode
from fallow.flower.looks import Looks


def test_a_wait_costs_at_most_a_tenth_more_and_a_long_one_few_looks() -> None:
    now = [100.0]
    looks = Looks(0.2, 3.0, lambda: now[0])
    assert looks.wait() == 0.2
    at = []
    while now[0] < 160:
        now[0] += looks.wait()
        at.append(now[0] - 100)
    assert all(b - a <= max(0.2, a / 10) + 1e-9 for a, b in pairwise(at)) and at[-1] - at[-2] == pytest.approx(3.0)
    assert len(at) < 10 + 29 + 11 + 2  # 10 in the first 2 s, ln(30/2)/ln(1.1) up to 30 s, then each 3 s
    looks.found()
    assert looks.wait() == 0.2


def test_a_super_node_looks_soon_after_a_message_and_less_often_later(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, now = list[float](), [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(supernode, "Looks", partial(Looks, now=lambda: now[0]))
    clock = supernode.Clock()
    while now[0] < 160:
        clock.sleep(3)
    assert slept[0] == 0.5 and slept[-1] == 3.0 and slept == sorted(slept)
    slept.clear()
    clock.sleep(0.5)  # a message has come
    clock.sleep(3)
    assert slept == [0.1, 0.5] and clock.perf_counter is time.perf_counter


def test_flower_s_loop_sleeps_as_is_thought_here() -> None:
    source = inspect.getsource(supernode.loop)
    assert "time" in vars(supernode.loop) and source.count("time.sleep(3)") == 1 and source.count("time.sleep(0.5)") == 2
