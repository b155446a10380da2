"""The pages agree with the project: ranges, links, examples, figures."""

import re
import tomllib
from pathlib import Path

import click
import pytest

from coattn.cli.main import cli as coattn_command
from coattn.hf.families import FAMILIES, LOADERS
from coattn.hf.quantised.config import PACKED
from coattn.tools.plan.estimate import held as kv_bytes
from coattn.tools.plan.known import find_config
from coattn.tools.plan.shape import read_shape
from coattn.units import format_bytes
from coattn_lab.cli.main import lab

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to {target}"


def test_dependencies_are_those_of_the_project() -> None:
    listed = dict(re.findall(r"^\| ([\w-]+) \| `([^`]+)` \|", (ROOT / "docs" / "dependencies.md").read_text(), re.M))
    wanted = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["dev"],
        *LAB["project"]["optional-dependencies"]["eval"],
        *PROJECT["project"]["optional-dependencies"]["checks"],
        *PROJECT["project"]["optional-dependencies"]["ray"],
        *PROJECT["project"]["optional-dependencies"]["docs"],
        *PROJECT["build-system"]["requires"],
    ]
    assert listed == dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in wanted)  # type: ignore[union-attr]


def test_families_are_counted() -> None:
    for page in ("README.md", "docs/models.md", "docs/faq.md"):
        assert re.search(rf"\b{len(FAMILIES)} (families|are tested)", (ROOT / page).read_text()), page


def test_forms_of_weights_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "quantised_weights.md").read_text()
    rows = re.findall(r"^\| (`.+?) \| runs it.*? \| ([^|]+) \|$", page, re.M)
    found = {name: package for names, package in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert found == {**LOADERS, **dict.fromkeys(PACKED, "coattn itself")}


def test_the_options_in_the_pages_exist() -> None:
    groups = {"coattn": coattn_command, "coattn-lab": lab}
    for page in (*PAGES, ROOT / "Dockerfile"):
        for line in re.findall(r"(?<![\w/.-])(coattn(?:-lab)? [a-z][^\n`]*)", page.read_text()):
            program, *words = re.split(r"\s[#|&]", line)[0].split()
            command = groups[program]
            while isinstance(command, click.Group) and words and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
            asked = {word.split("=")[0].strip("'\",.)") for word in words if word.startswith("--")}
            assert asked <= known or command is groups[program], f"{page.name}: {line}"


NOT_READ = ("reference/", "log/", "glossary.md", "families.md")
"""Pages that are generated, history, or looked things up in."""


@pytest.mark.parametrize("page", PAGES[3:], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_answers_with_a_snippet(page: Path) -> None:
    text = page.read_text()
    if str(page.relative_to(ROOT / "docs")).startswith(NOT_READ):
        return
    assert len(text.split()) <= 800
    title, *first = text.split("\n\n")[:4]
    assert title.startswith("# ")
    assert "```" in "".join(first), "a command or a snippet stands at the top"


def test_the_index_has_every_page_once() -> None:
    listed = re.findall(r"^- \[.+?\]\(([\w/]+\.md)\)", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[3:] if page.stem != "index")


def test_the_minimum_in_the_memory_page_is_right() -> None:
    layers, kv_heads, head_dim = 30, 3, 64  # of SmolLM2
    token = 2 * 2 * layers * kv_heads * head_dim
    least = 32 * token + 2 * 32 * (token // layers)
    text = (ROOT / "docs" / "memory_minimum.md").read_text()
    assert f"{token:,}" in text
    assert f"{least:,} bytes" in " ".join(text.split())


def test_make_targets_are_all_explained() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for target in targets.split():
        assert f"`make {target}`" in text, target


SOUGHT = ("Prefix caching", "Continuous batching", "chunked prefill", "YaRN", "MoE", "LoRA", "Speculative", "Docker",
          "RTX", "Windows", "AMD", "Apple")  # fmt: skip


@pytest.mark.parametrize("word", SOUGHT)
def test_words_that_people_search_for_have_an_answer(word: str) -> None:
    assert word in (ROOT / "docs" / "faq.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


PAPERS = sorted((ROOT / "docs" / "methods").glob("*.md"))


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: str(page.name))
def test_evidence_that_a_method_page_names_exists(page: Path) -> None:
    tests = {path: path.read_text() for top in ("tests", "lab/tests") for path in (ROOT / top).rglob("test_*.py")}
    everything = "\n".join(tests.values())
    files = [
        path.as_posix() for path in (*(ROOT / "src" / "coattn").rglob("*.*"), *(ROOT / "lab").rglob("*.py"), *tests)
    ]
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    for name in named:
        if name.endswith((".py", ".cu", ".h")):
            assert any(path.endswith("/" + name) for path in files), name
        elif name.startswith("test_"):
            assert f"def {name}(" in everything, name


def test_the_example_of_a_long_answer_is_what_the_plan_says() -> None:
    text = (ROOT / "docs" / "long_answers.md").read_text(encoding="utf-8")
    table = text.split("A chain of thought of 200,000 tokens")[1].split("1.5 GiB of it")[0]
    found = re.findall(r"^\| `(\w+)` \| ([\d.]+ \w+) \| ([\d.]+ \w+|-)", table, re.MULTILINE)
    assert len(found) == 5
    model = read_shape(*find_config("Qwen3-8B"))
    for method, gpu, host in found:
        for said, held in zip((gpu, host), kv_bytes(method, model, 1, 200_000), strict=True):
            want = format_bytes(held) if held else "-"
            assert said in (want, re.sub(r"[\d.]+", lambda n: str(round(float(n[0]))), want)), (method, said, want)
