"""The pages: links that lead somewhere, commands and options that exist, and sentences that once were wrong."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import dbcl
from dbcl.cli import app
from dbcl.protocol import UpdateValidator, influence, reputation

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").glob("*/*.md"),
        *ROOT.glob("examples/*/*.md"),
    ]
)
README = (ROOT / "README.md").read_text()
MODULES = sorted({*dbcl.MODULES} - {"errors", "plan", "state"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)", page.read_text())
    missing = [path for path, _ in links if not (page.parent / path).exists()]
    assert missing == []
    for path, anchor in links:
        target = page.parent / path
        if anchor and target.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs


def commands() -> dict[str, set[str]]:
    """The options of every command."""
    group = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_their_options_exist(page: Path) -> None:
    known = commands()
    if page.name == "CHANGELOG.md":
        pytest.skip("names options of older versions")
    text = page.read_text().replace("\\\n", " ")
    for command, rest in re.findall(r"(?:^ {4}|`)dbcl ([a-z]+)([^`\n#]*)", text, flags=re.MULTILINE):
        assert command in known, f"dbcl {command}"
        unknown = set(re.findall(r"--[a-z][a-z-]+", rest)) - known[command] - {"--help"}
        assert not unknown, f"dbcl {command}"


def test_the_command_for_own_data_works_as_written(tmp_path: Path) -> None:
    part = (ROOT / "docs/howto/own-data.md").read_text().split("## On the command line")[1]
    (tmp_path / "shops.py").write_text(part.split("```python\n")[1].split("```")[0])
    command = re.search(r"^    (dbcl train .*?[^\\])$", part, flags=re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
    words = [sys.executable, "-m", *command.replace("\\\n", " ").replace("--rounds 60", "--rounds 2").split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "averaged over about" in done.stdout


def test_the_flower_diff_imports_what_it_uses() -> None:
    diff = (ROOT / "docs/howto/flower.md").read_text().split("## The diff")[1].split("```")[1]
    assert "+import dbcl" in diff
    assert "dbcl.flower.DoubleBlind" in diff


def test_the_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", ["presets", "speed"])
def test_a_table_of_the_readme_is_that_of_the_page(page: str) -> None:
    """A figure stands in two places: they must not part."""
    title = {"presets": "## Which preset", "speed": "## Speed"}[page]
    rows = re.findall(r"^\|.*$", README.split(title)[1].split("\n## ")[0], flags=re.MULTILINE)
    assert len(rows) > 4
    assert "\n".join(rows) in (ROOT / "docs" / f"{page}.md").read_text()


def test_table_1_of_the_page_is_what_was_played() -> None:
    section = (ROOT / "docs/reproduction.md").read_text().split("\n## table1\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*$", section, flags=re.MULTILINE)
    assert len(rows) > 10
    assert "\n".join(rows) in (ROOT / "results/table1/README.md").read_text()


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_readmes_diff_train(sign: str) -> None:
    diff = README.split("## In your code")[1].split("```diff\n")[1].split("```")[0]
    code = "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", sign))

    class Client:
        data = torch.ones(5, 8)

        def __init__(self, name: str) -> None:
            self.name = name

    def train(model: torch.nn.Module, data: torch.Tensor) -> None:
        model(data).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        trained.append(model)

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))

    trained: list[torch.nn.Module] = []
    names: dict[str, Any] = {
        "Net": net,
        "train": train,
        "clients": [Client("ann"), Client("bob")],
        "rounds": 2,
        "copy": copy,
    }
    exec(code.replace("average(...)", "local"), names)
    assert len(trained) == 4
    assert ("server" in names and names["server"].round == 2) == (sign == "+")


def test_every_public_name_is_in_the_reference() -> None:
    """The pages of modules list all that these export; what `dbcl` itself exports is named one by one."""
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(r":: (dbcl[\w.]*)$", reference, flags=re.MULTILINE))
    names = {f"dbcl.{name}" for name in dbcl.__all__ if name not in MODULES and not name.startswith("_")}
    errors = {f"dbcl.{name}" for name in vars(dbcl.errors) if name.endswith("Error")}
    missing = names - errors - described
    assert missing == set(), f"docs/api/dbcl.md does not have {missing}"
    without = [module for module in MODULES if not any(each.startswith(f"dbcl.{module}") for each in described)]
    assert without == [], f"docs/api has no page for {without}"


FALSE = (
    "withstand a client",
    "The server is trusted** in this version",
    "No differential privacy by default",
    "it cannot tell a harmful update",
    "the last five rounds",
    "nothing here hides a single update",
    "No preset protects a model that is given away",
    "the server never sees a gradient as it is",
)
"""Sentences that stood on a page and were false, or have become so."""


@pytest.mark.parametrize("sentence", FALSE)
def test_no_page_says_again_what_was_false(sentence: str) -> None:
    pages = [*PAGES, *(ROOT / "docs").rglob("*.ipynb")]
    assert [page.name for page in pages if sentence in " ".join(page.read_text().split())] == []


def test_the_page_of_the_protocol_has_the_limits_of_the_code() -> None:
    text = " ".join((ROOT / "docs" / "protocol.md").read_text().split())
    for stated in (
        f"`MIN_CLIENTS` = {reputation.MIN_CLIENTS} accepted",
        f"`MIN_ROUNDS` = {reputation.MIN_ROUNDS} rounds",
        f"{reputation.DECAY:g} times as much",
        f"The limit is {reputation.UNTRUSTED:g}",
        f"the last {influence.RECENT_ROUNDS} rounds",
        f"`max_influence`, {UpdateValidator().max_influence:g} unless set",
        f"`outlier_factor`, {UpdateValidator().outlier_factor:g} unless set",
        str(influence.DISAGREES),
    ):
        assert stated in text


def test_the_pages_say_which_buffer_is_clamped() -> None:
    for name in ("concepts.md", "protocol.md"):
        text = (ROOT / "docs" / name).read_text()
        assert "`running_var`" in text
        assert "no negative entry" not in text
        assert "without negative entries" not in text
