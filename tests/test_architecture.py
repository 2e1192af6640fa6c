"""docs/architecture.md: its recipes are followed to the letter, and its map names what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
RECIPES = dict(re.findall(r"^## (Add an? [a-z]+)\n.*?```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))


def test_there_are_three_recipes() -> None:
    assert list(RECIPES) == ["Add a sketch", "Add an engine", "Add an attack"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_written(name: str, tmp_path: Path) -> None:
    """The code of a recipe is a whole test file: pytest runs it in a folder of its own."""
    (tmp_path / "test_recipe.py").write_text(RECIPES[name])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_recipe.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|md|json))`", PAGE)) | set(re.findall(r"`((?:\w+/)+)`", PAGE))
    places = [ROOT, ROOT / "src" / "dbcl", *(path for path in (ROOT / "src" / "dbcl").iterdir() if path.is_dir())]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert len(named) > 30
    assert missing == []


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name + "/" * path.is_dir() for path in (ROOT / "src" / "dbcl").iterdir() if path.name[:2] != "__"}
    told = set(re.findall(r"`(\w+(?:/|\.py))`", PAGE))
    assert rooms - told - {"_version.py", "py.typed", "presets/"} == set()
