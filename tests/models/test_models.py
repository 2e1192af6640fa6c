"""One step of every model of the zoo, by itself: `.venv-models/bin/pytest -m models tests/models -k GPT`."""

import importlib.util
import warnings

import pytest

from models.table import check
from models.zoo import ENTRIES, Entry

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

PACKAGES = {
    "neuraloperator": "neuralop",
    "pytorch-tabnet": "pytorch_tabnet",
    "torch-geometric": "torch_geometric",
    "x-transformers": "x_transformers",
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.library}, {entry.name}")
def test_one_step_is_exact_or_refused_in_a_sentence(entry: Entry) -> None:
    package = PACKAGES.get(entry.library, entry.library.replace("-", "_"))
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{entry.library} is not installed; `make test-models` does that")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = check(entry)
    assert row.good, row.verdict
