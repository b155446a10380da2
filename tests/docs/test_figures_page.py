"""docs/figures.md: every figure and table of the papers is there, its command parses, its result is a clean one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from coattn.cli.main import cli
from coattn.evaluate.results import fault, read_result

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "figures.md"
WANTED = {
    "HGCA": ["Table 1", *(f"Figure {n}" for n in (3, 4, 5, 6, 10, 11, 12, 13, 15))],
    "ScoutAttention": ["Table 1", *(f"Figure {n}" for n in (2, 3, 6, 7, 8, 9, 10, 11, 12))],
    "HCAttention": [*(f"Table {n}" for n in (1, 2, 3, 4)), *(f"Figure {n}" for n in (2, 3, 4)), "Appendix B"],
}


def lines() -> list[tuple[str, list[str]]]:
    """Paper and cells of every line of the tables."""
    found = []
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        paper = part.splitlines()[0]
        for line in part.splitlines():
            if line.startswith("| ") and not line.startswith("| of the paper"):
                cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
                found.append((paper, [cell.strip().replace("\\|", "|") for cell in cells]))
    return found


LINES = lines()


def test_every_figure_is_listed() -> None:
    for paper, wanted in WANTED.items():
        there = [cells[0] for name, cells in LINES if name == paper]
        assert [each for each in wanted if each not in there] == []


@pytest.mark.parametrize(("paper", "cells"), LINES, ids=[f"{paper} {cells[0]}" for paper, cells in LINES])
def test_a_line_has_a_result_or_says_that_there_is_none(paper: str, cells: list[str]) -> None:
    assert len(cells) == 4, paper
    files = re.findall(r"\]\(\.\./(results/[^)]+)\)", " ".join(cells))
    for name in files:
        assert fault(read_result(ROOT / name)) is None, name
    said = cells[2].startswith(("not run", "cannot be had", "as Figure", "exact, by"))
    assert files or said, cells
    if files or cells[2].startswith("cannot"):
        assert cells[3], "a result has a sentence on agreement, what cannot be had a reason"


def commands() -> list[str]:
    return [found for _, cells in LINES for found in re.findall(r"`coattn ([^`]+)`", cells[1])]


@pytest.mark.parametrize("text", commands())
def test_commands_are_understood(text: str) -> None:
    """Parsed as the command line would, and not run."""
    command: click.Command = cli
    words = shlex.split(text)
    context = click.Context(cli, info_name="coattn")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_parser(context).parse_args(list(words))
    for parameter in command.params:
        if parameter.name == "shapes" and "--shapes" in words:
            from coattn.hf.random_model import SHAPES

            assert words[words.index("--shapes") + 1] in SHAPES
