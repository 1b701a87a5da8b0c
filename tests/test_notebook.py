"""The example notebook runs, and shows what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
import nbformat  # noqa: E402

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


@pytest.mark.multiprocess
def test_the_notebook_runs_and_shows_tables_curves_and_a_page(tmp_path: Path) -> None:
    written = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in written["cells"]), "outputs are not kept in the repository"
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    of_processes = ("LOCAL_", "MASTER_", "NODE_", "PL_", "RANK", "WORLD_")  # which Lightning leaves from earlier tests
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_processes)}
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, startup_timeout=300, resources=place)
    client.execute(env=environment)
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    pages = ["".join(out["data"].get("text/html", "") for out in outputs if "data" in out) for outputs in shown]
    run, ledger, curves, predictions, _, report, _ = pages
    assert "FedAvg" in run
    assert "va_long_beach" in run
    assert "weights" in ledger
    assert curves.count("<svg") >= 3
    assert "predicted" in predictions
    assert report.startswith("<iframe")
    # progress is plain text, and no cell needs a magic line
    printed = "".join(out["text"] for out in shown[0] if out.output_type == "stream" and out.name == "stdout")
    assert "round 20/20" in printed
    last = shown[4][-1]["data"]["text/plain"]
    assert "'FedCORAL': 0." in last
    assert "['healthy', 'disease']" in shown[-1][-1]["data"]["text/plain"]
