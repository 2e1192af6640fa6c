"""PyTorch models: their tensors, the layers that can be sketched, and the paper's networks."""

from dbcl.model.products import find_layers

__all__ = ["find_layers"]
