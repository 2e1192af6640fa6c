"""Examples of every kind give the same batches, and what is none is refused in a sentence."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dbcl.data import DatasetExamples, TensorExamples, examples_of
from dbcl.data.trees import call, join, map_tensors
from dbcl.errors import DataError

X, Y = torch.arange(24.0).view(6, 4), torch.arange(6)


class Pairs(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return X[row], Y[row]


class Named(Pairs):
    """As a dataset of the transformers kind gives them."""

    def __getitem__(self, row: int) -> Any:
        return {"x": X[row], "labels": Y[row]}


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        Pairs(),
        DataLoader(Pairs(), batch_size=2, shuffle=True),
        list(zip(X, Y, strict=True)),
        DataLoader(TensorDataset(X, Y), drop_last=True),
    ],
    ids=["tensors", "arrays", "TensorDataset", "dataset", "loader", "list", "loader of tensors"],
)
def test_every_kind_gives_the_same_batches(source: Any) -> None:
    examples = examples_of(source)
    assert len(examples) == 6
    part = examples.subset(np.array([5, 1, 3])).subset(np.array([2, 0]))
    inputs, targets = part.to("cpu").take(np.array([1, 0]))
    assert inputs.equal(X[[5, 3]])
    assert targets.equal(Y[[5, 3]])
    assert examples.first(2).targets.tolist() == [0, 1]
    assert examples.first(99).targets.tolist() == list(range(6))


def test_dictionaries_and_several_inputs() -> None:
    inputs, targets = examples_of(Named()).take(np.array([2]))
    assert inputs["x"].equal(X[2:3])
    assert targets.tolist() == [2]
    both = examples_of(TensorDataset(X, X + 1, Y)).take(np.array([4]))
    assert isinstance(both.inputs, tuple)
    assert both.inputs[1].equal(X[4:5] + 1)
    tree = examples_of(({"a": X, "b": (X, X)}, {"y": Y})).take(np.array([0, 1]))
    assert tree.inputs["b"][1].equal(X[:2])
    assert tree.targets["y"].tolist() == [0, 1]


def test_a_loaders_own_way_to_put_examples_together_is_kept() -> None:
    """Sentences of different lengths, padded to the longest of their batch."""
    sentences = [(torch.arange(1, 2 + n), n % 2) for n in range(5)]

    def pad(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        words = nn.utils.rnn.pad_sequence([words for words, _ in items], batch_first=True)
        return words, torch.tensor([label for _, label in items])

    examples = examples_of(DataLoader(sentences, collate_fn=pad))  # type: ignore[arg-type]
    assert examples.take(np.array([0, 3])).inputs.shape == (2, 4)
    assert examples.take(np.array([0, 1])).inputs.shape == (2, 2)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X, Y[:3]), r"a row for each example, got the shapes \(6, 4\), \(3,\)"),
        ((X, torch.tensor(1)), "a row for each example"),
        (("words", Y), "inputs and targets are tensors, or tuples and dictionaries of them; got str"),
        (Stream(), "Stream is a stream: it has no length"),
        (DataLoader(Stream()), "Stream is a stream"),
        (3, "examples are a pair .inputs, targets., a dataset or a DataLoader; got int"),
        ((X[:0], Y[:0]), "a set of examples is empty"),
        ([], "a set of examples is empty"),
    ],
)
def test_what_is_no_set_of_examples_is_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        examples_of(source)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"x": X[0], "y": Y[0]}, "needs its target under labels, label, targets, target; got x, y"),
        (X[0], r"an example must be a pair \(input, target\) or a dictionary, got Tensor"),
    ],
)
def test_examples_without_a_target_are_refused(item: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DatasetExamples([item, item]).take(np.array([0]))


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Output(dict):
    """As transformers' outputs are: made by keywords, read by attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_trees_keep_their_kind() -> None:
    point = map_tensors(lambda tensor: tensor + 1, Point(X, Y))
    assert type(point) is Point
    assert point.y.equal(Y + 1)
    joined = join([Output(logits=X, loss=torch.tensor(1.0), cache=None), Output(logits=X, loss=torch.tensor(3.0))])
    assert joined.logits.shape == (12, 4)
    assert float(joined.loss) == 2.0
    assert joined.cache is None
    assert join([[X], [X]])[0].shape == (12, 4)


def test_models_are_called_by_position_or_by_keywords() -> None:
    class Subtract(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    assert call(Subtract(), (X, X)).eq(0).all()
    assert call(Subtract(), {"b": X, "a": 2 * X}).equal(X)


def test_subsets_share_their_tensors() -> None:
    examples = examples_of((X, Y))
    assert isinstance(examples, TensorExamples)
    assert examples.subset(np.array([1])).inputs is X
