"""The notebooks of the documentation run from top to bottom, and are committed as they ran."""

import ast
import math
import platform
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
TOLERANCE = 0.05
"""Largest difference of two fractions, absolute or relative: other kernels change the figures of a trained model."""
OF_PYTHON = ("text.ipynb",)
"""Trained on texts that come with Python, which each version words anew."""


def texts(cell: Any) -> list[str]:
    """Return what a cell printed, and how its results read as text."""
    printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    results = [output.data["text/plain"] for output in cell.outputs if "text/plain" in output.get("data", {})]
    return [printed, *results]


def differences(committed: Any, executed: Any) -> list[str]:
    """Return where two notebooks' outputs differ in words, in whole numbers, or in fractions beyond the tolerance."""
    found = []
    for number, (before, after) in enumerate(zip(*map(code_cells, (committed, executed)), strict=True), 1):
        for one, other in zip_longest(texts(before), texts(after), fillvalue=""):
            if unlike(one, other):
                found.append(f"cell {number}: {one!r} is committed, and it gave {other!r}")
    return found


def unlike(one: str, other: str) -> bool:
    words = [re.sub(r"\s+", "", NUMBER.sub("#", text)) for text in (one, other)]
    if words[0] != words[1]:
        return True
    return not all(map(close, NUMBER.findall(one), NUMBER.findall(other)))


def close(one: str, other: str) -> bool:
    if "." not in one:
        return one == other
    return math.isclose(float(one), float(other), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def code_cells(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own processes
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_gives_what_is_committed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    committed, book = (nbformat.read(FOLDER / name, as_version=4) for _ in range(2))
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert code_cells(book)[-1].execution_count
    if name not in OF_PYTHON or committed.metadata.language_info.version == platform.python_version():
        assert differences(committed, book) == []


@pytest.mark.parametrize(
    ("committed", "executed", "alike"),
    [
        ("R2 0.58, plain 0.58", "R2 0.57, plain 0.61", True),
        ("R2 0.58, plain 0.58", "R2 0.45, plain 0.58", False),
        ("R2 0.58", "R2 -0.58", False),
        ("40 of 40 rounds", "39 of 40 rounds", False),
        ("far from guessing", "close to guessing", False),
        ("a line\nand more 0.5", "a line and\nmore 0.5", True),
        ("tensor([ 0.8551, -0.8881])", "tensor([ 0.8550, -0.8882])", True),
        ("tensor([ 0.8551, -0.8881])", "tensor([ 0.8551])", False),
        ("in clear: nothing", "", False),
        ("1.2e-05", "1.3e-05", True),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(committed: str, executed: str, alike: bool) -> None:
    def book(text: str) -> Any:
        cell = nbformat.v4.new_code_cell(
            "print()", outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)]
        )
        return nbformat.v4.new_notebook(cells=[cell])

    assert (differences(book(committed), book(executed)) == []) == alike


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_run_names_its_settings(name: str) -> None:
    """Each page says what protects its run; what is taken otherwise may change."""
    for cell in code_cells(nbformat.read(FOLDER / name, as_version=4)):
        calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "simulate":
                assert "settings" in {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_as_it_ran(name: str) -> None:
    book = nbformat.read(FOLDER / name, as_version=4)
    counts = [cell.execution_count for cell in book.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    logged = [output.text for output in outputs if output.get("name") == "stderr"]
    assert [text for text in logged if not text.startswith("not every update counted in full:")] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_notebooks() -> None:
    assert {"table.ipynb", "text.ipynb", "segmentation.ipynb"} <= set(NOTEBOOKS)
