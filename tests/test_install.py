"""How dbcl is installed: never by a name that is somebody else's on the package index."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FROM_THE_INDEX = re.compile(r"pip install\s+(?:-\S+\s+)*['\"]?dbcl|\bdbcl\[\w[\w,]*\]")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [path for path in files if path != Path(__file__)]


def text_of(path: Path) -> str:
    try:
        text = path.read_text()
    except UnicodeDecodeError:  # a picture or a golden file
        return ""
    return text.split("## 0.1.0")[0] if path.name == "CHANGELOG.md" else text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'dbcl[flower]'", True),
        ("pip install --upgrade dbcl", True),
        ('dependencies = ["dbcl[flower]"]', True),
        ("pip install dbcl-torch", True),
        ("pip install '.[flower]' in a clone of dbcl", False),
        ('"dbcl-torch[audit]"', False),
        ('content["dbcl"]["broadcast"]', False),
    ],
)
def test_the_old_advice_would_be_found(text: str, wrong: bool) -> None:
    assert bool(FROM_THE_INDEX.search(text)) is wrong


def test_no_file_advises_to_install_it_by_name_from_the_index() -> None:
    files = tracked()
    assert len(files) > 150
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}" for path in files for match in FROM_THE_INDEX.finditer(text_of(path))
    ]
    assert found == []


def test_the_distribution_has_a_name_of_its_own_and_its_extras_follow() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "dbcl-torch"
    assert {"audit", "flower", "tensorboard"} <= project["optional-dependencies"].keys()
    assert "dbcl-torch[audit,flower,tensorboard]" in project["optional-dependencies"]["dev"]
    app = tomllib.loads((ROOT / "examples/flower-app/pyproject.toml").read_text())["project"]
    assert [each for each in app["dependencies"] if each.startswith("dbcl")] == []
