"""Datasets, downloads, partitions among clients, and custom examples."""

from dbcl.data.datasets import EMBEDDED, LOADERS, Dataset, data_root, load
from dbcl.data.examples import Batch, DatasetExamples, Examples, TensorExamples, examples_of
from dbcl.data.fetch import fetch
from dbcl.data.partition import dirichlet, iid, shards

__all__ = [
    "EMBEDDED",
    "LOADERS",
    "Batch",
    "Dataset",
    "DatasetExamples",
    "Examples",
    "TensorExamples",
    "data_root",
    "dirichlet",
    "examples_of",
    "fetch",
    "iid",
    "load",
    "shards",
]
