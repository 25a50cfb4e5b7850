"""Notebooks are executed by a real kernel, with fewer steps and prompts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

FEWER = {
    "STEPS = 40": "STEPS = 2",
    '"prompts": 50': '"prompts": 6',
    "evaluation.prompts=50": "evaluation.prompts=6",
    "threads=1,": "threads=1, data={'limit': 64},",
    "seeds=1,": "seeds=1, jobs=1,",
    'f"steps={STEPS}"': 'f"steps={STEPS}", "data.limit=64"',
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_progress(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for many, few in FEWER.items():
        assert any(many in cell.source for cell in notebook.cells), many
        for cell in notebook.cells:
            cell.source = cell.source.replace(many, few)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    shown = [
        [
            str(output.data.get("text/html", ""))
            for output in cell.outputs
            if output.output_type == "display_data"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    texts = [str(o.get("text", "")) for cell in notebook.cells for o in cell.get("outputs", ())]
    assert [text for text in texts if "IProgress" in text] == []
    of_cells = [[re.sub("<[^>]+>", "", html) for html in cell if "<pre" in html] for cell in shown]
    assert max(map(len, of_cells)) == 1  # a table is redrawn in its place
    tables = [table for cell in of_cells for table in cell]
    assert any("2/2" in table and "left" in table and "reward" in table for table in tables)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_install_the_package_where_it_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(path, as_version=4)
    (cell, *_) = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = TransformerManager().transform_cell(cell)
    called: list[tuple[str, ...]] = []
    shell = SimpleNamespace(run_line_magic=lambda *words: called.append(words))
    for found in (object(), None):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        exec(code, {"get_ipython": lambda: shell})
        assert bool(called) is (found is None)
    assert called == [("pip", "install --quiet {SOURCE}")]
