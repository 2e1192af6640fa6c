"""docs/architecture.md: its recipes run as written, and its tables name files that exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
RECIPES = dict(re.findall(r"^## (Add an? [a-z ]+)\n.*?```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))


def test_there_are_four_recipes() -> None:
    assert list(RECIPES) == ["Add a sketch", "Add a noise mechanism", "Add an engine", "Add an attack"]


def test_the_recipes_work_as_written(tmp_path: Path) -> None:
    """The code of a recipe is a whole test file; pytest runs all recipes in a separate folder."""
    for name, code in RECIPES.items():
        (tmp_path / f"test_{name.replace(' ', '_')}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    for name in RECIPES:
        assert f"PASSED test_{name.replace(' ', '_')}.py::" in done.stdout


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|md|json))`", PAGE)) | set(re.findall(r"`((?:\w+/)+)`", PAGE))
    packages = [ROOT / "src" / "dbcl", ROOT / "src" / "dbcl_audit"]
    folders = [path for package in packages for path in package.iterdir() if path.is_dir()]
    places = [ROOT, ROOT / "src", *packages, *folders]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert len(named) > 30
    assert missing == []


def test_every_module_is_on_the_page() -> None:
    modules = {path.name + "/" * path.is_dir() for path in (ROOT / "src" / "dbcl").iterdir() if path.name[:2] != "__"}
    named = set(re.findall(r"`(\w+(?:/|\.py))`", PAGE))
    assert modules - named - {"_version.py", "py.typed", "presets/"} == set()
