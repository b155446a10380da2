"""Sphinx configuration of the site: `make docs-site` builds it, and a warning is an error."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"].get("Repository")
"""Where files outside docs/ are shown; without it the site names them and links nowhere."""

project = "coattn"
release = re.search(r'= "(.+)"', (HERE.parent / "src/coattn/_version.py").read_text(encoding="utf-8"))[1]
html_title = f"coattn {release}"
extensions = ["myst_parser"]
exclude_patterns = ["images", "serving"]
root_doc = "index"
html_theme = "furo"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
smartquotes = False  # options keep their two dashes


def contents(text: str) -> str:
    """The index with a hidden table of contents under each of its headings: the pages that are listed there."""
    parts = re.split(r"(?m)^(?=## )", text)
    for i, part in enumerate(parts[1:], 1):
        pages = dict.fromkeys(re.findall(r"^- \[[^]]*\]\(([\w/]+)\.md\)", part, re.M))
        caption = part.splitlines()[0].removeprefix("## ")
        parts[i] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", "", ""])
    return "".join(parts)


def outside(text: str, page: str) -> str:
    """Links to files outside docs/ lead to the repository, where it has an address; else they are their text."""

    def link(match: re.Match[str]) -> str:
        target = (HERE / page).parent.joinpath(match[2].split("#")[0]).resolve()
        if match[2].startswith(("http", "#")) or (target.is_relative_to(HERE) and target.suffix == ".md"):
            return match[0]
        return f"[{match[1]}]({SOURCE}/blob/main/{target.relative_to(HERE.parent)})" if SOURCE else match[1]

    return re.sub(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)", link, text)


def read(_: Sphinx, name: str, source: list[str]) -> None:
    """Called with the text of each page before it is parsed."""
    source[0] = outside(contents(source[0]) if name == root_doc else source[0], f"{name}.md")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
