"""Uniform access to examples in tensors, PyTorch datasets and loaders."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from dbcl.data.trees import Tree, join, map_tensors, tensors
from dbcl.errors import DataError

Rows = NDArray[np.int64]
TARGETS = ("labels", "label", "targets", "target")
"""Dictionary keys that may hold an example's target."""
DIGEST_BATCH = CHECK_BATCH = 1000
"""Number of examples per batch for digests and for the NaN check."""


class Batch(NamedTuple):
    """Batch of examples: model inputs and targets.

    >>> Batch(torch.zeros(2, 8), torch.zeros(2)).targets.shape
    torch.Size([2])
    """

    inputs: Tree
    targets: Tree


class Examples(ABC):
    """Set of examples, of one client or of all clients. Use `examples_of` to make a set from
    tensors, datasets or loaders.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, rows: Rows) -> Batch:
        """Return the examples with these indices as one batch."""

    def take_alone(self, rows: Rows) -> list[Batch]:
        """Return the examples with these indices, each loaded and collated independently of the
        others.

        A collate function may pad examples to the longest of the batch, or mix examples. Examples
        of equal shape are combined to one batch.

        >>> def padded(pairs):
        ...     return torch.nn.utils.rnn.pad_sequence([x for x, _ in pairs], batch_first=True), torch.zeros(len(pairs))
        >>> texts = DatasetExamples([(torch.ones(length), 0) for length in (1, 2, 2)], padded)
        >>> [tuple(batch.inputs.shape) for batch in texts.take_alone(np.arange(3))]
        [(1, 1), (2, 2)]
        """
        alike: list[list[Batch]] = []
        for row in rows:
            batch = self.take(np.asarray([row]))
            if not alike or _shapes(batch) != _shapes(alike[-1][0]):
                alike.append([])
            alike[-1].append(batch)
        return [Batch(*join([tuple(batch) for batch in batches])) for batches in alike]

    @abstractmethod
    def subset(self, rows: Rows) -> "Examples":
        """Return the examples with these indices as a separate set, without copying."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Examples":
        """Return the same examples with their batches on a device."""

    def divide(self, parts: Iterable[Rows]) -> "list[Examples]":
        """Return one subset per part, such as the parts returned by `dbcl.data.iid`.

        >>> [len(part) for part in examples_of((torch.zeros(5, 2), torch.zeros(5))).divide(np.split(np.arange(5), [2]))]
        [2, 3]
        """
        return [self.subset(rows) for rows in parts]

    def digest(self, most: int | None = None) -> bytes:
        """Return a SHA-256 digest of the examples and their order, independent of the type of the
        set.

        Args:
            most: Number of examples to read at equal distances; None for all. The digest always
                includes the total number of examples.

        >>> x, y = torch.eye(3), torch.arange(3)
        >>> one, same, turned = (examples_of(each) for each in ((x, y), list(zip(x, y)), (x.flip(0), y.flip(0))))
        >>> one.digest() == same.digest(), one.digest() == turned.digest()
        (True, False)
        """
        digest = hashlib.sha256(str(len(self)).encode())
        rows = np.arange(len(self)) if most is None else np.unique(np.linspace(0, len(self) - 1, most).astype(np.int64))
        for start in range(0, len(rows), DIGEST_BATCH):
            batch = self.take(rows[start : start + DIGEST_BATCH])
            for tensor in tensors(tuple(batch)):
                digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.digest()

    def first(self, count: int) -> Batch:
        """Return a batch of the first `count` examples, or of all examples if there are fewer."""
        return self.take(np.arange(min(count, len(self))))


class TensorExamples(Examples):
    """Examples in memory: tensors with one example per row, or tuples and dictionaries of tensors.

    Args:
        inputs: Model inputs.
        targets: Targets.
        rows: Row indices of the examples; None for all rows.

    >>> examples = TensorExamples({"ids": torch.arange(12).view(6, 2)}, torch.arange(6))
    >>> len(examples), examples.subset(np.array([4, 2])).take(np.array([0])).inputs
    (6, {'ids': tensor([[8, 9]])})
    """

    def __init__(self, inputs: Tree, targets: Tree, rows: Rows | None = None) -> None:
        sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors((inputs, targets))}
        if len(sizes) != 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors((inputs, targets)))
            raise DataError(f"every tensor needs a row for each example, got the shapes {shapes or 'of no tensor'}")
        self.inputs, self.targets = inputs, targets
        self.rows = np.arange(sizes.pop()) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Rows) -> Batch:
        index = torch.from_numpy(np.asarray(self.rows[rows], dtype=np.int64))
        return Batch(*map_tensors(lambda tensor: tensor[index.to(tensor.device)], (self.inputs, self.targets)))

    def take_alone(self, rows: Rows) -> list[Batch]:
        return [self.take(rows)]  # rows of tensors have nothing to do with each other

    def subset(self, rows: Rows) -> "TensorExamples":
        return TensorExamples(self.inputs, self.targets, self.rows[rows])

    def to(self, device: torch.device | str) -> "TensorExamples":
        inputs, targets = map_tensors(lambda tensor: tensor.to(device), (self.inputs, self.targets))
        return TensorExamples(inputs, targets, self.rows)


class DatasetExamples(Examples):
    """Examples of a map-style dataset, read on demand and combined by a collate function.

    An example is a pair (input, target), or a dictionary with the target under "labels", "label",
    "targets" or "target".

    Args:
        dataset: The dataset.
        collate: Function that combines a list of examples to a batch.
        rows: Indices of the examples; None for all.
        device: Device of the batches.

    >>> squares = [(torch.tensor([float(n)]), torch.tensor([float(n * n)])) for n in range(5)]
    >>> DatasetExamples(squares).take(np.array([3])).targets
    tensor([[9.]])
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] = default_collate,
        rows: Rows | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dataset, self.collate, self.device = dataset, collate, device
        self.rows = np.arange(len(dataset)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Rows) -> Batch:
        batch = _pair(self.collate([self.dataset[int(row)] for row in self.rows[rows]]))
        return Batch(*map_tensors(lambda tensor: tensor.to(self.device), tuple(batch)))

    def subset(self, rows: Rows) -> "DatasetExamples":
        return DatasetExamples(self.dataset, self.collate, self.rows[rows], self.device)

    def to(self, device: torch.device | str) -> "DatasetExamples":
        return DatasetExamples(self.dataset, self.collate, self.rows, device)


def examples_of(source: Any) -> Examples:
    """Make a set of examples from a pair (inputs, targets), a PyTorch dataset, or a loader.

    Inputs and targets are tensors, NumPy arrays, or tuples and dictionaries of them. From a loader,
    only the dataset and the collate function are used: the training defines batch size and order.

    Args:
        source: The examples. An `Examples` object is returned unchanged.

    >>> len(examples_of((np.zeros((7, 3), dtype=np.float32), np.zeros(7)))), type(examples_of([(1.0, 2.0)])).__name__
    (7, 'DatasetExamples')
    """
    if isinstance(source, Examples):
        found = source
    elif isinstance(source, DataLoader):
        _refuse_streams(source.dataset)
        found = DatasetExamples(source.dataset, source.collate_fn or default_collate)
    elif isinstance(source, TensorDataset) and len(source.tensors) > 1:
        *inputs, targets = source.tensors
        found = TensorExamples(inputs[0] if len(inputs) == 1 else tuple(inputs), targets)
    elif isinstance(source, tuple) and len(source) == 2:
        found = TensorExamples(_as_tensors(source[0]), _as_tensors(source[1]))
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping | str):
        found = DatasetExamples(source)
    else:
        _refuse_streams(source)
        raise DataError(
            f"examples are a pair (inputs, targets), a dataset or a DataLoader; got {type(source).__name__}"
        )
    if not len(found):
        raise DataError("a set of examples is empty")
    return found


def _shapes(batch: Batch) -> list[torch.Size]:
    """Return the tensor shapes of one example."""
    return [tensor.shape[1:] for tensor in tensors(tuple(batch))]


def check_finite(who: str, examples: Examples) -> None:
    """Raise `DataError` if examples contain NaN or infinity, which would make the loss non-finite.

    Args:
        who: Owner of the examples, for the error message.
        examples: The examples.

    >>> check_finite("client 3", examples_of((torch.tensor([[1.0], [torch.nan]]), torch.zeros(2))))
    Traceback (most recent call last):
        ...
    dbcl.errors.DataError: client 3: 1 of 2 examples hold NaN or infinity in their inputs, the first of them example ...
    """
    found: dict[str, list[int]] = {"inputs": [], "targets": []}
    for start in range(0, len(examples), CHECK_BATCH):
        batch = examples.take(np.arange(start, min(start + CHECK_BATCH, len(examples))))
        for what, tree in zip(found, batch, strict=True):
            rows = set[int]()
            for each in tensors(tree):
                if each.is_floating_point() and not (finite := each.isfinite()).all():
                    rows |= set((~finite.unsqueeze(-1).flatten(1).all(dim=1)).nonzero()[:, 0].tolist())
            found[what] += [start + row for row in sorted(rows)]
    for what, bad in found.items():
        if bad:
            raise DataError(
                f"{who}: {len(bad)} of {len(examples)} examples hold NaN or infinity in their {what}, the first of "
                f"them example {bad[0]}; leave them out or fill in the values"
            )


def _pair(batch: Any) -> Sequence[Any]:
    if isinstance(batch, Mapping):
        for name in TARGETS:
            if name in batch:
                return {key: value for key, value in batch.items() if key != name}, batch[name]
        raise DataError(
            f"an example that is a dictionary needs its target under {', '.join(TARGETS)}; got {', '.join(batch)}"
        )
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, targets = batch
        return inputs[0] if len(inputs) == 1 else tuple(inputs), targets
    raise DataError(f"an example must be a pair (input, target) or a dictionary, got {type(batch).__name__}")


def _as_tensors(tree: Any) -> Tree:
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, Mapping):
        return {name: _as_tensors(part) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map(_as_tensors, tree))
    if isinstance(tree, Tensor):
        return tree
    raise DataError(f"inputs and targets are tensors, or tuples and dictionaries of them; got {type(tree).__name__}")


def _refuse_streams(source: Any) -> None:
    if isinstance(source, IterableDataset):
        raise DataError(
            f"{type(source).__name__} is a stream: it has no length and no order to draw batches from; use a dataset "
            "with __len__ and __getitem__, or play the rounds yourself (dbcl.Server, dbcl.blinded, dbcl.make_update)"
        )
