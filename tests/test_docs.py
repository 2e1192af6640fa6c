"""The pages: links that lead somewhere, commands and options that exist, and sentences that once were wrong."""

import re
from pathlib import Path

import pytest
import typer

from dbcl.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*/*.md")])


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


def test_the_flower_diff_imports_what_it_uses() -> None:
    diff = (ROOT / "README.md").read_text().split("## In your Flower app")[1].split("```")[1]
    assert "+import dbcl" in diff
    assert "dbcl.flower.DoubleBlind" in diff


def test_no_page_promises_to_withstand_a_client_with_a_memory() -> None:
    assert [page.name for page in PAGES if "withstand a client" in page.read_text()] == []


def test_the_pages_say_which_buffer_is_clamped() -> None:
    for name in ("concepts.md", "protocol.md"):
        text = (ROOT / "docs" / name).read_text()
        assert "`running_var`" in text
        assert "no negative entry" not in text
        assert "without negative entries" not in text
