"""What lies in `results/` and `bench/` is what the code makes of it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bench import five, results
from fallow.errors import UserError
from fallow.runs.settings import resolve

RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize("data", five.DATA)
@pytest.mark.parametrize("method", five.METHODS)
def test_a_reference_differs_from_its_method_in_nothing_it_can_share(data: str, method: str) -> None:
    ours, reference = (resolve({}, five.Cell(data, method, r, 0).keys())[1] for r in (False, True))
    for key in ("labels", "label_count", "partition", "unlabelled_partition", "clients", "model", "norm", "rounds", "steps"):
        assert getattr(ours, key) == getattr(reference, key), key
    for key in ("epochs", "server_steps", "batch", "optimizer", "lr", "schedule", "clip", "clip_value", "momentum"):
        assert getattr(ours, key) == getattr(reference, key), key
    assert (reference.method, reference.average, reference.labeller, reference.debias) == ("fedavg", "mean", None, False)


def test_the_committed_tables_are_those_of_the_committed_runs() -> None:
    page = (RESULTS / "README.md").read_text()
    assert results.page(RESULTS) == page
    assert page.count("fallow run feddure/table1") > 5


def test_a_users_error_can_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(UserError("this is wrong", "do that")))
    assert isinstance(error, UserError) and str(error) == "this is wrong; do that."
