"""The public names: what `import dbcl` gives, with and without the extras."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dbcl
from dbcl import errors

WITHOUT_EXTRAS = """
import importlib, importlib.util, pkgutil, sys
EXTRAS = ("flwr", "ray", "scipy", "sklearn", "torchmetrics", "pytest", "hypothesis")
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in EXTRAS else real(name, *more)
sys.meta_path.insert(0, Absent())
"""


def run_python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_every_public_name_is_there() -> None:
    assert [name for name in dbcl.__all__ if not hasattr(dbcl, name)] == []
    assert {*dbcl.__all__} <= {*dir(dbcl)}
    assert len(dbcl.__all__) <= 16
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dbcl.nothing  # noqa: B018


def test_all_errors_are_of_one_kind() -> None:
    own = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(own) > 5
    assert all(issubclass(each, dbcl.DbclError) for each in own)


def test_every_public_class_and_function_has_an_example() -> None:
    shown = [getattr(dbcl, name) for name in dbcl.__all__]
    documented = [each for each in shown if inspect.isfunction(each) or inspect.isclass(each)]
    bare = [each.__name__ for each in documented if ">>>" not in inspect.getdoc(each)]
    assert len(documented) > 10
    assert [name for name in bare if not name.endswith("Error")] == []


def test_the_extras_load_on_first_use_and_not_before(tmp_path: Path) -> None:
    code = (
        "import sys, dbcl; assert not {'flwr', 'sklearn', 'scipy', 'matplotlib'} & set(sys.modules); "
        "dbcl.flower.DoubleBlind; dbcl.engines.LocalEngine; dbcl.data.load; print('flwr' in sys.modules)"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.split() == ["True"], done.stderr


def test_without_the_extras_only_what_needs_them_is_missing(tmp_path: Path) -> None:
    code = f"""{WITHOUT_EXTRAS}
import dbcl
missing = []
for module in pkgutil.walk_packages(dbcl.__path__, "dbcl.", onerror=lambda name: None):
    if module.name == "dbcl.__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ImportError:
        missing.append(module.name)
print(*missing)
for room in ("flower", "testing"):
    try:
        getattr(dbcl, room)
    except ImportError as error:
        print(error)
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    missing, flower, testing = done.stdout.splitlines()
    assert {name.split(".")[1] for name in missing.split()} == {"flower", "testing"}
    assert "the remedy: pip install '.[flower]' in a clone of dbcl" in flower
    assert "the remedy: pip install pytest" in testing


def test_the_command_runs_without_the_extras(tmp_path: Path) -> None:
    code = f"""{WITHOUT_EXTRAS}
import runpy
sys.argv = ["dbcl", "plan", "mnist-mlp", "--json"]
runpy.run_module("dbcl", run_name="__main__")
"""
    done = run_python(code, tmp_path)
    assert '"message_bytes"' in done.stdout, done.stderr
