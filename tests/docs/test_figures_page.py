"""docs/figures.md: every figure and table of the papers is there, its command parses, its result is a clean one."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

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
    said = cells[2].startswith(("no result yet", "cannot be had", "as Figure", "exact, by"))
    assert files or said, cells
    assert cells[3], "a result has a sentence on agreement, what is not there a reason"


def test_numbers_are_those_of_the_files() -> None:
    """The page is made of the files; what stands in for a file that is not there has the numbers of the others."""
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / "scripts" / "make_figures.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look there
    spec.loader.exec_module(script)
    assert PAGE.read_text(encoding="utf-8") == script.page(ROOT / "results"), "run `python scripts/make_figures.py`"

    def rows(name: str) -> dict[str, dict[str, Any]]:
        found = read_result(ROOT / "results" / name)["rows"]
        return {row.get("row") or row["method"]: row for row in found}

    sweep, decode = rows("sweep_qwen2.5_coder_16k.json"), rows("decode_qwen3_8b_32k.json")
    hgca, scout = rows("decode_qwen3_8b_32k_hgca.json"), rows("decode_qwen3_8b_32k_scout.json")
    paper, codes = sweep["hgca-paper,window_blocks=128"], sweep["hcattention-paper"]
    stand_ins = " ".join(cell for _, lines, _ in script.PARTS for line in lines for cell in line.without)
    for said in (
        f"perplexity {paper['ratio']:.3f} of full attention's; KL says more, {paper['kl']:.3f}",
        f"takes {decode['cpu']['ms_per_step']:.0f} ms where loading it takes {decode['offload']['ms_per_step']:.0f}",
        f"{hgca['hgca']['ms_per_step']:.0f} ms against {decode['offload']['ms_per_step']:.0f} by loading",
        f"with {hgca['hgca']['kept_share']:.1%} of the entries kept",
        f"makes {scout['scout']['tokens_per_s'] / scout['full']['tokens_per_s']:.2f} times `full`'s tokens",
        f"keeps {codes['kept_mean']:.1%} of the tokens",
        f"at {codes['ratio']:.3f} of full attention's perplexity and a KL of {codes['kl']:.3f}",
    ):
        assert said in stand_ins, said


def commands() -> list[str]:
    return [found for _, cells in LINES for found in re.findall(r"`coattn ([^`]+)`", cells[1])]


@pytest.mark.parametrize("text", commands())
def test_commands_are_understood(text: str) -> None:
    """Parsed as the command line would, and not run."""
    command: click.Command = cli
    words = shlex.split(text)
    # with the settings of the command itself: click keeps what it makes of them
    context = click.Context(cli, info_name="coattn", **cli.context_settings)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, info_name=name, parent=context, **found.context_settings)
    command.make_parser(context).parse_args(list(words))
    for parameter in command.params:
        if parameter.name == "shapes" and "--shapes" in words:
            from coattn.hf.random_model import SHAPES

            assert words[words.index("--shapes") + 1] in SHAPES
