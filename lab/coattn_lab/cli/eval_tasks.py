"""`coattn-lab eval tasks`: RULER, needles, LongBench and plain texts: prompts made into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coattn.cli.options import Count, numbers
from coattn.cli.output import err, progress
from coattn.errors import ConfigError, InputError
from coattn.progress import progress_line
from coattn.text import read_text
from coattn_lab.cli.groups import evaluate

SOURCES = ("ruler", "needle", "longbench", "text")


@evaluate.group()
def tasks() -> None:
    """Prompts of tasks with answers, made into a file, which can be carried to another machine.

    `coattn-lab eval table` lets every row answer them.
    """


@tasks.command()
@click.argument("target", metavar="FILE")
@click.option("--benchmarks", default="ruler,needle", show_default=True, help="Which ones, with commas.")
@click.option("--lengths", callback=numbers, help="Tokens of prompt and answer.  [default: 4096,8192,16384,32768]")
@click.option("--samples", default=20, show_default=True, type=Count(1), help="Prompts of each task and length.")
@click.option("--skip", default=0, show_default=True, type=Count(0), help="Leave out so many of each dataset first.")
@click.option("--depths", default=5, show_default=True, type=Count(1, 100), help="Places of each needle.")
@click.option("--seed", default=42, show_default=True, type=Count(0), help="Decides what is drawn.")
@click.option("--tasks", "names", metavar="NAMES", help="Only these tasks of RULER or LongBench, with commas.")
@click.option("--data", metavar="FOLDER", help="LongBench's or MiniLongBench's JSONL files, or LongBench's data.zip.")
@click.option("--haystack", metavar="FILE", help="A UTF-8 text for needles; default: the help topics of Python.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE",
    help="A UTF-8 text that rows are compared along; repeatable; default: the help topics of Python.",
)
@click.option(
    "--model", default="smollm2", show_default=True, help="Whose tokens count: a name, a folder, or a GGUF file."
)
def make(target: str, **options: Any) -> None:
    """Write prompts into FILE, as JSONL; packed if its name ends with .gz.

    RULER's 13 tasks come from its own generators (pip install 'coattn-lab[eval]'). A prompt is text; its length is
    counted in --model's tokens.
    """
    path = Path(target)
    wanted = _words(options["benchmarks"])
    unknown = [name for name in wanted if name not in SOURCES]
    if "longbench" in wanted and options["data"] is None:
        raise ConfigError("--data is missing, where LongBench's files are.", "Give the folder.")
    if unknown or not wanted:
        raise ConfigError(f"There is no benchmark {(unknown or [''])[0]!r}.", f"There are {', '.join(SOURCES)}.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent}.", "Make it, or choose another path.")
    if path.exists() and path.stat().st_size and not _is_ours(path):
        raise InputError(f"{path} is there already, and is no file of prompts.", "Choose another path.")

    from coattn.provenance import provenance
    from coattn_lab.evaluate.tasks import prompts as files

    found, sources = _make(wanted, options)
    about = {"model": options["model"] if "/" not in options["model"] else Path(options["model"]).name}
    origin = {key: value for key, value in provenance().items() if key in ("command", "commit", "tree", "versions")}
    sha256 = files.write_prompts(path, found, {**about, "sources": sources, **origin})
    counts = {name: sum(prompt.benchmark.removeprefix("mini") == name for prompt in found) for name in wanted}
    said = ", ".join(f"{count} of {name}" for name, count in counts.items())
    err.print(f"wrote {path}: {said}; sha256 {sha256[:16]}", soft_wrap=True, highlight=False)


def _make(wanted: list[str], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    from coattn.provenance import package_version
    from coattn_lab.evaluate.tasks import longbench_make, needle_make, ruler_make, text_make
    from coattn_lab.evaluate.tasks.tokenizer import load_tokenizer

    lengths = sorted(set(options["lengths"] or [4096, 8192, 16384, 32768]))
    samples, seed = options["samples"], options["seed"]
    names = _words(options["names"]) or list(ruler_make.TASKS)
    if "ruler" in wanted:
        ruler_make.check_package()
    text = read_text(options["haystack"])
    with progress_line("model: ") as show:
        tokenizer, most = load_tokenizer(options["model"], on_progress=show)
    if most is not None and max(lengths) > most:
        raise InputError(
            f"--lengths has {max(lengths):,}, but the model has only {most:,} positions.", f"Give {most} or less."
        )
    made: list[Any] = []
    sources: dict[str, Any] = {}
    if "ruler" in wanted:
        with progress("ruler", len(names)) as bar:
            made += ruler_make.make(
                tokenizer, lengths, samples, seed, names, most, lambda _: bar.advance(bar.task_ids[0])
            )
        sources["ruler"] = {
            "package": "nvidia-long-context-eval",
            "version": package_version("nvidia-long-context-eval"),
        }
    if "needle" in wanted:
        made += needle_make.make(tokenizer, text, lengths, options["depths"], seed)
        sources["needle"] = {"text": text.name, "sha256": text.sha256}
    if "longbench" in wanted:
        prompts, sha256 = longbench_make.make(
            Path(options["data"]), tokenizer, lengths, samples, _words(options["names"]), options["skip"]
        )
        made += prompts
        sources["longbench"] = {"sha256": sha256, "skip": options["skip"]}
    if "text" in wanted:
        texts = [read_text(path) for path in options["texts"] or (None,)]
        made += text_make.make(tokenizer, texts, lengths, samples)
        sources["text"] = [each.as_dict() for each in texts]
    return made, {**sources, "lengths": lengths, "samples": samples, "seed": seed}


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _is_ours(path: Path) -> bool:
    from coattn_lab.evaluate.tasks.prompts import read_prompts

    try:
        read_prompts(path)
    except InputError:
        return False
    return True
