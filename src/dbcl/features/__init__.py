"""Public features: fixed feature extractors, on which only a small head is trained."""

from dbcl.features.extract import extract
from dbcl.features.images import ImageFeatures
from dbcl.features.scattering import Scattering
from dbcl.features.text import HashedText

__all__ = ["HashedText", "ImageFeatures", "Scattering", "extract"]
