"""The notebook of examples/ does what it says, in a real kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE

NOTEBOOK = HERE.parent / "examples" / "first_steps.ipynb"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after all of its cells, with what they printed."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class Here(AsyncKernelManager):
        """A kernel of this Python, whatever kernels are installed on the machine."""

        kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python")

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(notebook, kernel_manager_class=Here, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, folder


def outputs(notebook: Any, start: str) -> list[Any]:
    """What the cell printed that begins so."""
    cell = next(c for c in notebook.cells if c.cell_type == "code" and c.source.startswith(start))
    return list(cell.outputs)


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in cells if c["cell_type"] == "code")


def test_each_run_shows_a_bar_and_then_itself(done: Any) -> None:
    notebook, folder = done
    bar, card = outputs(notebook, "alone =")
    assert bar.output_type == "display_data" and card.output_type == "execute_result"
    summary = json.loads((folder / "runs" / "alone" / "summary.json").read_text())
    score = f"{100 * summary['last']:.2f} %"
    assert '<progress value="8" max="8"' in bar.data["text/html"] and score in bar.data["text/html"]
    assert "<svg" in card.data["text/html"] and score in card.data["text/html"] and "Result('runs/alone'" in card.data["text/plain"]


def test_nothing_is_written_to_standard_error(done: Any) -> None:
    assert not [o for c in done[0].cells if c.cell_type == "code" for o in c.outputs if o.output_type in ("stream", "error")]


def test_curves_and_labels_are_shown(done: Any) -> None:
    notebook, folder = done
    assert [o.output_type for o in outputs(notebook, "axis =")] == ["display_data"]
    assert "image/png" in outputs(notebook, "axis =")[0].data and "image/png" in outputs(notebook, "from matplotlib")[0].data
    labels = outputs(notebook, "from fallow.data")[0].data["text/plain"]
    assert labels.startswith("(['") and labels.count("'") == 16
    config = (Path(folder) / "runs" / "own" / "config.yaml").read_text()
    assert "data: arrays" in config and "clients: 3" in config
