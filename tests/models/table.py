"""One SGD step of each model of the zoo through dbcl and again without it; writes the table of docs/models.md.

python tests/models/table.py docs/models.md
"""

import argparse
import importlib.metadata
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from independent import largest_error

import dbcl
from dbcl.errors import DbclError
from dbcl.testing.nested import nested
from models.zoo import ENTRIES, Entry

EXACT = {torch.float64: 1e-9, None: 1e-4}
BEGIN, END = "<!-- made by `make test-models` -->", "<!-- end -->"


class Row(NamedTuple):
    """What became of a model."""

    entry: Entry
    verdict: str
    share: float
    parameters: int
    good: bool


def axes(model: nn.Module, name: str, entry: Entry) -> tuple[int, ...]:
    """On which axes a weight's inputs lie, by what PyTorch's documentation says of its layer or else the entry."""
    for ending, given in entry.inputs.items():
        if name.endswith(ending):
            return given
    module, weight = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return (0, *range(2, weight.ndim))
    if isinstance(
        module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase
    ):
        return tuple(range(1, weight.ndim))
    raise AssertionError(
        f"{name} is sketched, and the zoo does not say where the inputs of {type(module).__name__} are"
    )


class Whole(nn.Module):
    """A model and its loss."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.model, self.loss = entry.make(), entry.loss

    def forward(self) -> Tensor:
        return self.loss(self.model)


def found_layers(entry: Entry) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix("model."): axes for name, axes in dbcl.model.find_layers(Whole(entry)).items()}


def check(entry: Entry) -> Row:
    """Compare one step, or give the sentence that refuses the model."""
    model = entry.make()
    count = sum(parameter.numel() for parameter in model.parameters())
    settings = {"coverage": "hidden", **entry.settings}
    try:
        settings |= {"layers": found_layers(entry)} if entry.find else {}
        plan = dbcl.SketchPlan.from_model(model, **nested({"veil": 0, **settings}))
        inputs = {tensor.name: axes(model, tensor.name, entry) for tensor in plan.tensors if tensor.sketched}
        error = largest_error(entry.make, entry.loss, inputs, **settings)
    except DbclError as refusal:
        return Row(entry, "refused: " + str(refusal).splitlines()[-1].strip(" -"), 0.0, count, True)
    good = error < EXACT[entry.dtype]
    return Row(entry, f"{'exact' if good else 'WRONG'}, {error:.0e}", plan.share_sketched, count, good)


def version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def line(row: Row) -> str:
    name = f"{row.entry.library} {version(row.entry.library)}".strip()
    return f"| {name} | {row.entry.name} | {row.parameters:,} | {row.share:.0%} | {row.verdict} |".replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", help="the page whose table is replaced")
    parser.add_argument("--only", default="", help="a part of the names to run; the page is left alone then")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for entry in ENTRIES:
        if asked.only.lower() not in f"{entry.library} {entry.name}".lower():
            continue
        start = time.perf_counter()
        try:
            rows.append(check(entry))
        except Exception as error:
            if not asked.only:
                raise RuntimeError(f"{entry.library}, {entry.name}") from error
            raise
        print(f"{line(rows[-1])} {time.perf_counter() - start:.1f} s", flush=True)
    if asked.page is not None and not asked.only:
        before, _, rest = asked.page.read_text().partition(BEGIN)
        table = ["| library | model | parameters | sketched | one step |", "|---|---|---|---|---|", *map(line, rows)]
        asked.page.write_text("\n".join([before + BEGIN, "", *table, "", END + rest.partition(END)[2]]))
    sys.exit(not all(row.good for row in rows))


if __name__ == "__main__":
    main()
