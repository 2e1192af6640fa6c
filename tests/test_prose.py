"""Rules of prose and size that a test can check: how docstrings begin, phrases to avoid, and the length of modules."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/dbcl", "src/dbcl_audit", "experiments")
MAX_LINES = 350
"""Lines of a module; a longer one says why in its docstring, in a sentence that begins with `LONGER`."""
LONGER = "Longer than 350 lines"
FIRST_WORDS = re.compile(r"(What|Who|Whose|How|Which|Whether|That|Where|When|Why)\b")
"""Words with which no docstring begins: it begins with a verb or a noun."""
PHRASES = {
    r"somebody|\bnobody's\b|such as nobody|whoever": "name the person or the party",
    r"\bstrangers?\b": "untrusted sender",
    r"those of them\b|\bso many\b": "name the things",
    r"\bin clear\b|\bin the clear\b": "unprotected",
    r"\b(stays?|stayed) at home\b": "not sent",
    r"\b(the|a) door\b|\blet (in|through)\b": "validate, accept, reject",
    r"\brehears": "simulated run",
    r"\bseats?\b": "adversary",
    r"\bmake small\b": "minimise",
    r"\bone's own\b": "custom",
    r"\bveils one W\b|surely have not|follows from W as these": "say which values are meant",
}
"""Phrases that must not come back, each with the word to use."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over the docstrings of a module, also those of constants and attributes."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for each in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_verb_or_a_noun(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in modules(package)
        for line, text in docstrings(path)
        if FIRST_WORDS.match(text)
    ]
    assert found == []


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over the lines of a page, or over the comments, docstrings and messages of a module."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text("utf-8").splitlines(), 1)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            text = token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)) and " " in token.string
            if token.type == tokenize.COMMENT or text:
                yield from enumerate(token.string.splitlines(), token.start[0])


@pytest.mark.parametrize("folder", [*PACKAGES, "docs"])
def test_phrases_of_the_old_prose_do_not_come_back(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.md")) if folder == "docs" else modules(folder)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r}; write: {remedy}"
        for path in paths
        if path.name != "changelog.md"
        for number, line in prose(path)
        for phrase, remedy in PHRASES.items()
        if (match := re.search(phrase, line, re.IGNORECASE))
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_long_module_says_why(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines"
        for path in modules(package)
        if len((text := path.read_text("utf-8")).splitlines()) > MAX_LINES
        and LONGER not in (ast.get_docstring(ast.parse(text)) or "")
    ]
    assert found == []
