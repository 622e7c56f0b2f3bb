"""Gradient diversity: worked numbers, its bounds, and its invariances."""

import math

import pytest
import torch

from fallow import models
from fallow.measure.diversity import FORMS, diversity, every, norm_parameters, per_group, vector
from fallow.methods.state import State


def rows(*vectors):
    return [torch.tensor(v, dtype=torch.float64) for v in vectors]


G = rows((1, 0, 2, -1), (0, 1, 1, 1), (2, -1, 0, 1))
GS = rows((1, 1, 1, 0))[0]
START = torch.tensor((1, -1, 0.5, 2), dtype=torch.float64)
ENDS = rows((0.9, -1.0, 0.3, 2.1), (1.0, -1.2, 0.4, 1.9), (0.8, -0.9, 0.6, 1.7))
END_S = torch.tensor((0.9, -1.1, 0.5, 1.9), dtype=torch.float64)

TABLE = {
    "gradient/users": (15 / 19, 1.521263, 41 / 49, 11 / 7),
    "gradient/all": (18 / 34, 1.434257, 0.5, 1.4),
    "update/users": (27 / 23, 1.829081, 1.0, 1.666667),
    "update/all": (0.75, 1.660830, 0.625, 1.5),
}
TIMES_N = {
    "gradient/users": (2.368421, 2.510204),
    "gradient/all": (2.117647, 2.0),
    "update/users": (3.521739, 3.0),
    "update/all": (3.0, 2.5),
}


def test_the_sixteen_worked_numbers():
    found = every(G, [w - START for w in ENDS], (GS, END_S - START))
    assert list(found) == [f"{name}/{form}" for name in TABLE for form in FORMS] and len(found) == 16
    for name, numbers in TABLE.items():
        for form, number in zip(FORMS, numbers):
            assert found[f"{name}/{form}"] == pytest.approx(number, abs=1e-6), (name, form)


def test_the_released_codes_scale_multiplies_the_squared_forms_by_n():
    found = every(G, [w - START for w in ENDS], (GS, END_S - START), scale="times-n")
    for name, (l2, l1) in TIMES_N.items():
        assert found[f"{name}/l2-squared"] == pytest.approx(l2, abs=1e-6)
        assert found[f"{name}/l1-squared"] == pytest.approx(l1, abs=1e-6)
        assert found[f"{name}/l2"] == pytest.approx(TABLE[name][1], abs=1e-6)
        assert found[f"{name}/l1"] == pytest.approx(TABLE[name][3], abs=1e-6)


def test_grouped_updates_are_taken_from_each_groups_own_start():
    starts = rows((1, -1, 0.5, 2), (1, -1, 0.5, 2), (1.1, -1, 0.4, 1.9))
    users = [w - s for w, s in zip(ENDS, starts)]
    server = END_S - torch.tensor((1.05, -1, 0.45, 1.95), dtype=torch.float64)
    for form, alone, with_server, grouped in zip(
        FORMS,
        (1.363636, 1.949000, 1.5, 2.0),
        (0.828221, 1.735409, 0.981859, 1.857143),
        (1.476190, 1.206205, 1.518519, 1.222222),
    ):
        assert diversity(users, form) == pytest.approx(alone, abs=1e-6)
        assert diversity([*users, server], form) == pytest.approx(with_server, abs=1e-6)
        assert per_group([users[:2], users[2:]], form) == pytest.approx(grouped, abs=1e-6)


def test_bounds_and_scale_invariance():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 5):
        v = [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(n)]
        for form, (_, a) in FORMS.items():
            assert diversity(v, form) >= (1 / n if a == 2 else 1) - 1e-12
            assert diversity([3.7 * x for x in v], form) == pytest.approx(diversity(v, form), rel=1e-12)
            assert diversity([v[0]] * n, form) == pytest.approx(1 / n if a == 2 else 1, rel=1e-12)


def test_a_single_sgd_step_has_the_gradients_diversity():
    updates = [(START - 0.1 * g) - START for g in G]
    for form in FORMS:
        assert diversity(updates, form) == pytest.approx(diversity(G, form), rel=1e-9)


def test_zero_sums():
    zero, one = torch.zeros(3), torch.ones(3)
    assert math.isnan(diversity([zero, zero]))
    assert diversity([one, -one]) == math.inf


def test_without_a_server_eight_are_left():
    assert len(every(G, G)) == 8


def test_vectors_of_states_with_and_without_norms():
    net = models.build("small-cnn", 10, 1, norm="gn", size=8)
    start = State.of(net)
    norms = norm_parameters(net)
    weights = dict(net.named_parameters())
    assert norms and all(weights[n].dim() == 1 for n in norms)
    left = sum(p.numel() for n, p in weights.items() if n not in norms)
    assert len(vector(start, norms)) == left < len(vector(start)) == sum(p.numel() for p in weights.values())
