"""PyTorch models: named tensors, detection of sketchable layers, and the paper's networks."""

from dbcl.model.products import find_layers

__all__ = ["find_layers"]
