"""Debiased aggregation against tables of worked numbers, and against second ways of computing it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fallow.config import Config
from fallow.methods.parts import dma

A = torch.tensor([(0.70, 0.10, 0.10, 0.10), (0.10, 0.60, 0.20, 0.10), (0.10, 0.20, 0.30, 0.40)], dtype=torch.float64)
B = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(10, 0.3), size=10))

TABLE_A = {  # form: weights, residual
    "post": ("0.316148 0.291981 0.391871", 0.075266),
    "post99": ("0.294625 0.286268 0.419106", 0.062802),
    "loop": ("0.357325 0.230489 0.412187", 0.082849),
    "loop99": ("0.223620 0.318681 0.457699", 0.064466),
    "loop-momentum": ("0.218032 0.223474 0.558494", 0.035208),
    "code": ("0.328558 0.330702 0.340740", 0.096576),
    "simplex": ("0.251799 0.201439 0.546763", 0.025446),
}
TABLE_B = {
    "post": (".116298 .075304 .092349 .081003 .072641 .093573 .159360 .090419 .105210 .113845", 0.170853),
    "post99": (".130943 .085471 .073148 .085617 .062586 .091412 .137411 .080725 .117204 .135483", 0.148149),
    "loop": (".114567 .104430 .077016 .099112 .086857 .097861 .090809 .084896 .118505 .125948", 0.151430),
    "loop-momentum": (".176418 .049119 .029630 .054114 .036894 .086190 .126781 .032582 .178619 .229654", 0.101906),
    "code": (".100967 .100623 .098317 .100191 .099077 .099909 .099231 .099068 .101097 .101521", 0.172356),
    "simplex": (".242493 0 0 0 0 .071407 .207131 0 .192995 .285974", 0.079309),
    "floor25": (".216696 .025 .025 .025 .025 .061534 .148956 .025 .185122 .262693", 0.092258),
    "floor50": (".190898 .05 .05 .05 .05 .051660 .090780 .05 .177250 .239412", 0.107595),
}
FORMS = {
    "post": {"dma": "paper-post"},
    "post99": {"dma": "paper-post", "dma_steps": 99},
    "loop": {"dma": "paper-loop"},
    "loop99": {"dma": "paper-loop", "dma_steps": 99},
    "loop-momentum": {"dma": "paper-loop", "dma_momentum": 0.9},
    "code": {"dma": "code"},
    "simplex": {"dma": "simplex"},
    "floor25": {"dma": "simplex", "dma_floor": 0.25},
    "floor50": {"dma": "simplex", "dma_floor": 0.5},
}


def weights(P: torch.Tensor, form: str) -> torch.Tensor:
    return dma.weights(P, Config(**FORMS[form]))


def residual(P: torch.Tensor, beta: torch.Tensor) -> float:
    return float((P.T @ beta - 1 / P.shape[1]).norm())


def random_rows(seed: int, clients: int, classes: int, concentration: float = 0.3) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.dirichlet(np.full(classes, concentration), size=clients))


def test_example_b_is_the_worked_one() -> None:
    first = "0.073053 0.000008 0.185370 0.062090 0.043078 0.251654 0.115726 0.263101 0.005919 0.000002"
    assert B[0].tolist() == pytest.approx([float(x) for x in first.split()], abs=1e-6)
    assert float((B * B).sum()) == pytest.approx(2.917452, abs=1e-6)


@pytest.mark.parametrize("P, table", [(A, TABLE_A), (B, TABLE_B)], ids="AB")
def test_tables(P: torch.Tensor, table: dict[str, tuple[str, float]]) -> None:
    for form, (row, r) in table.items():
        beta = weights(P, form)
        assert beta.tolist() == pytest.approx([float(x) for x in row.split()], abs=1e-6), form
        assert residual(P, beta) == pytest.approx(r, abs=1e-6), form
    assert residual(P, dma.equal(P)) == pytest.approx(0.1 if P is A else 0.174006, abs=1e-6)


def test_first_steps_by_hand() -> None:
    assert dma.distance(A, dma.equal(A)).tolist() == pytest.approx([0.05, 0.05, -0.05, -0.05])
    one = dma.printed(A, steps=1)
    assert one.tolist() == pytest.approx(torch.tensor([0.0333333333, 0.1333333333, 0.5333333333]).softmax(0).tolist(), abs=1e-7)
    assert dma.released(A, steps=1).tolist() == pytest.approx([0.326991, 0.330112, 0.342897], abs=1e-6)


def test_released_form_is_the_authors_loop() -> None:
    """A new torch SGD in every iteration, as their code builds it; and the map it comes to."""
    for P in (A, B, random_rows(3, 6, 100)):
        beta = torch.full((len(P),), 1 / len(P), dtype=torch.float64)
        short = beta.clone()
        for _ in range(100):
            w = beta.clone().requires_grad_()
            sgd = torch.optim.SGD([w], lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.9)
            ((P.T @ w - 1 / P.shape[1]) ** 2).mean().backward()
            sgd.step()
            beta = w.detach().softmax(0)
            short = (-0.71 * short - 1.9 * 2 / P.shape[1] * P @ (P.T @ short - 1 / P.shape[1])).softmax(0)
        assert torch.allclose(weights(P, "code"), beta, atol=1e-12)
        assert torch.allclose(short, beta, atol=1e-9)


def test_released_form_stays_near_uniform() -> None:
    extreme = torch.zeros(10, 10, dtype=torch.float64)
    extreme[:9, 0] = extreme[9, 1] = 1
    beta = weights(extreme, "code")
    assert beta.tolist() == pytest.approx([0.097077] * 9 + [0.126311], abs=1e-6)
    for seed in range(20):
        for classes in (2, 10, 100):
            beta = weights(random_rows(seed, 10, classes, 0.1), "code")
            assert float(beta.max() / beta.min()) <= np.exp(3.8 / classes)


def test_ridge_shares_between_equal_clients() -> None:
    beta = weights(torch.cat([A, A[2:]]), "simplex")
    assert beta.tolist() == pytest.approx([0.251799, 0.201439, 0.273381, 0.273381], abs=1e-6)
    assert residual(torch.cat([A, A[2:]]), beta) == pytest.approx(0.025446, abs=1e-6)


def kkt(P: torch.Tensor, beta: torch.Tensor, ridge: float, floor: float) -> None:
    S = len(P)
    gradient = P @ (P.T @ beta - 1 / P.shape[1]) + ridge * (beta - 1 / S)
    free = beta > floor / S + 1e-12
    assert float(gradient[free].max() - gradient[free].min()) < 1e-9
    assert bool((gradient[~free] >= gradient[free].mean() - 1e-9).all())


def test_case_that_stops_a_projected_gradient() -> None:
    """Methods section 18: more clients than classes and active bounds."""
    first = torch.tensor([0.80, 0.96, 0.72, 0.89, 0.42, 0.68, 0.99, 0.79, 0.98, 0.90], dtype=torch.float64)
    beta = weights(torch.stack([first, 1 - first], 1), "simplex")
    assert beta[[0, 2, 4]].tolist() == pytest.approx([0, 0.10553, 0.70854], abs=1e-5)
    kkt(torch.stack([first, 1 - first], 1), beta, 1e-8, 0.0)


@pytest.mark.parametrize("floor", [0.0, 0.25, 0.5])
def test_simplex_is_the_minimum(floor: float) -> None:
    """KKT conditions, and another solver with a ridge large enough for it."""
    for seed in range(8):
        P = random_rows(seed, int(2 + seed * 1.6), 2 + seed % 5)
        S, u = len(P), 1 / P.shape[1]
        kkt(P, dma.simplex(P, 1e-8, floor), 1e-8, floor)
        p = P.numpy()
        found = minimize(
            lambda b, p=p, u=u, S=S: 0.5 * ((p.T @ b - u) ** 2).sum() + 0.005 * ((b - 1 / S) ** 2).sum(),
            np.full(S, 1 / S), jac=lambda b, p=p, u=u, S=S: p @ (p.T @ b - u) + 0.01 * (b - 1 / S),
            bounds=[(floor / S, 1)] * S, constraints={"type": "eq", "fun": lambda b: b.sum() - 1, "jac": np.ones_like},
            method="SLSQP", options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        assert dma.simplex(P, 0.01, floor).numpy() == pytest.approx(found.x, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    for seed in range(5):
        P = random_rows(seed, 7, 5)
        beta = weights(P, form)
        assert float(beta.sum()) == pytest.approx(1, abs=1e-12)
        assert bool((beta >= 0).all())
        assert residual(P, weights(P, "simplex")) <= residual(P, beta) + 1e-9
        order = torch.tensor([3, 1, 0, 6, 5, 2, 4])
        assert torch.allclose(weights(P[order], form), beta[order], atol=1e-6)
    assert torch.allclose(weights(B[:1].repeat(4, 1), form), torch.full((4,), 0.25, dtype=torch.float64), atol=1e-7)
    assert weights(B[:1], form).tolist() == pytest.approx([1.0])


def test_rows_that_are_no_distributions_count_as_uniform() -> None:
    bad = A.clone()
    bad[0, 0], bad[1, 2] = float("nan"), -0.2
    want = A.clone()
    want[:2] = 0.25
    assert torch.equal(dma.checked(bad), want)
    o = SimpleNamespace(dma="simplex", dma_ridge=1e-8, dma_floor=0.0)
    assert bool(torch.isfinite(dma.weights(bad.float(), o)).all())
