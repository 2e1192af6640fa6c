"""Datasets, their download on request, and their division among clients."""

from dbcl.data.datasets import LOADERS, Dataset, data_root, load
from dbcl.data.fetch import fetch
from dbcl.data.partition import dirichlet, iid, shards

__all__ = ["LOADERS", "Dataset", "data_root", "dirichlet", "fetch", "iid", "load", "shards"]
