"""How Sphinx makes the site of these pages: `make docs`. Nothing is fetched while it builds."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util import logging

import dbcl

ROOT = Path(__file__).parents[1]

project = "dbcl"
author = "The dbcl developers"
version = release = dbcl.__version__
copyright = f"{author}, Apache-2.0. dbcl {version}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]

# Blocks without a language are commands and printed tables, which are not Python.
highlight_language = "none"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are shown with the outputs that they were committed with

# A docstring's `word` is code, and a link where it names something that is documented.
default_role = "py:obj"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "dbcl"
html_static_path = ["_static"]
html_css_files = ["dbcl.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": [], "quickstart": []}
html_theme_options = {
    "logo": {"text": "dbcl", "alt_text": "dbcl, the front page"},
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "github-light-high-contrast",
    "pygments_dark_style": "github-dark-high-contrast",
}

# Files of the repository that the site includes as pages of its own.
PAGES = {
    "README": "index",
    "CHANGELOG": "changelog",
    "CONTRIBUTING": "contributing",
    "SECURITY": "security",
    "examples/flower-app/README": "howto/flower-app",
    "results/audit/README": "results",
}


def lead_to_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Links to the repository's own Markdown files lead to the pages that include them."""
    for link in list(doctree.findall(pending_xref)):
        file = link["reftarget"].removeprefix(f"{ROOT}/").removesuffix(".md")
        if link["reftype"] == "myst" and file in PAGES:
            link["refdomain"], link["reftarget"] = "doc", PAGES[file]
            link.setdefault("reftargetid", None)
        elif link["reftype"] == "obj" and (ROOT / "src/dbcl" / file).is_dir():
            link.replace_self(link.children)  # `sketch` is an argument here, not the room of that name


def trim_examples(app: Sphinx, doctree: nodes.document) -> None:
    """The empty line that ends an example in a page is for doctest, not for the eye."""
    for block in doctree.findall(nodes.literal_block):
        if block.rawsource == block.astext() and block.rawsource.startswith(">>>"):
            block.rawsource = block.rawsource.rstrip()
            block.children = [nodes.Text(block.rawsource)]


def as_rst(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with examples: escape what reStructuredText would read into it."""
    made: list[str] = []
    example = block = False
    for line in lines:
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        indented = line.startswith("    ") and not example
        if indented and not block and made and not made[-1]:
            made += ["::", ""]
        block = indented or (block and not line)
        made.append(line if example or block else escaped(line))
    lines[:] = made


def escaped(line: str) -> str:
    """Escape stars, bars and references, but not in `code`."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def refuse_outside_assets(app: Sphinx, error: Exception | None) -> None:
    """A page must open without a network: no script, style, font or picture may come from elsewhere."""
    for page in sorted(Path(app.outdir).rglob("*.html")):
        found = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)", page.read_text()
        )
        for address in found:
            logging.getLogger(__name__).warning("%s loads %s", page.relative_to(app.outdir), address)


def skip_tests(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """A contract suite's tests are for pytest; a reader needs the methods to supply."""
    return True if name.startswith("test_") else None


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", lead_to_pages)
    app.connect("doctree-read", trim_examples)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-skip-member", skip_tests)
    app.connect("build-finished", refuse_outside_assets)
