"""Contract tests for custom sketches, noise mechanisms and engines; they need pytest.

A test class inherits a contract and implements the method that creates the tested object. It then
runs all tests of the contract:

    class TestMySketch(SketchContract):
        def draw(self, dim, width, seed=SEED, round=0, name="w"):
            return MySketch(dim, width, seed=seed, round=round, name=name)
"""

from importlib.util import find_spec

if find_spec("pytest") is None:
    raise ImportError("dbcl.testing needs pytest, which is not installed; the remedy: pip install pytest")

from dbcl.testing.clipping import SharedNoiseContract
from dbcl.testing.engine import EngineContract
from dbcl.testing.noise import NoiseMechanismContract
from dbcl.testing.secrecy import leaks
from dbcl.testing.sketch import SketchContract

__all__ = ["EngineContract", "NoiseMechanismContract", "SharedNoiseContract", "SketchContract", "leaks"]
