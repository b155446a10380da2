"""`coattn-lab eval tasks`: RULER, needles and LongBench: prompts made into a file, then many rows over it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from coattn.cli.evaluate import load_to_compare
from coattn.cli.options import Count, json_option, model_options, numbers, parse_settings
from coattn.cli.output import err, out, print_json, progress
from coattn.errors import ConfigError, InputError
from coattn.progress import progress_line
from coattn.text import read_text
from coattn_lab.cli.groups import empty_table, evaluate, raise_failed

SOURCES = ("ruler", "needle", "longbench")


@evaluate.group()
def tasks() -> None:
    """Tasks with answers over long prompts, many rows at once.

    `make` writes prompts into a file, which can be carried to another machine. `run` reads each prompt once and lets
    every row answer it from the same keys and values. `coattn-lab eval table` makes one table of the results.
    """


@tasks.command()
@click.argument("target", metavar="FILE")
@click.option("--benchmarks", default="ruler,needle", show_default=True, help="Which ones, with commas.")
@click.option("--lengths", callback=numbers, help="Tokens of prompt and answer.  [default: 4096,8192,16384,32768]")
@click.option("--samples", default=20, show_default=True, type=Count(1), help="Prompts of each task and length.")
@click.option("--depths", default=5, show_default=True, type=Count(1, 100), help="Places of each needle.")
@click.option("--seed", default=42, show_default=True, type=Count(0), help="Decides what is drawn.")
@click.option("--tasks", "names", metavar="NAMES", help="Only these tasks of RULER or LongBench, with commas.")
@click.option("--data", metavar="FOLDER", help="LongBench's or MiniLongBench's JSONL files, or LongBench's data.zip.")
@click.option("--haystack", metavar="FILE", help="A UTF-8 text for needles; default: the help topics of Python.")
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
    counts = {name: sum(prompt.benchmark == name for prompt in found) for name in wanted}
    said = ", ".join(f"{count} of {name}" for name, count in counts.items())
    err.print(f"wrote {path}: {said}; sha256 {sha256[:16]}", soft_wrap=True, highlight=False)


def _make(wanted: list[str], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    from coattn.provenance import package_version
    from coattn_lab.evaluate.tasks import longbench_make, needle_make, ruler_make
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
            Path(options["data"]), tokenizer, lengths, samples, _words(options["names"])
        )
        made += prompts
        sources["longbench"] = {"sha256": sha256}
    return made, {**sources, "lengths": lengths, "samples": samples, "seed": seed}


@tasks.command()
@click.option("--prompts", required=True, metavar="FILE", help="Prompts that `coattn-lab eval tasks make` wrote.")
@click.option("--rows", multiple=True, required=True, help="Rows, with commas: full,scout,budget=1024|2048,quest.")
@click.option("--out", "folder", required=True, metavar="DIR", help="One result file a row; goes on where it stopped.")
@click.option("--modes", default="read,fed", show_default=True, help="Question read with the prompt; fed as steps.")
@click.option("--lengths", callback=numbers, help="Only prompts of these lengths.")
@click.option("--tasks", "names", metavar="NAMES", help="Only these tasks, with commas.")
@click.option("--limit", type=Count(1), help="Only so many prompts of each task and length, the first ones.")
@click.option("--batch", default=16, show_default=True, type=Count(1), help="Prompts that are answered at a time.")
@click.option("--hold", metavar="SIZE", help="KV of prompts held at a time; default: 75% of the free GPU memory.")
@click.option("--raw", is_flag=True, help="No chat template: for a base model.")
@click.option("--whole", is_flag=True, help="Let answers run to their end, also when their score is known.")
@model_options
@json_option
def run(**options: Any) -> None:
    """Answer prompts under many rows. Each prompt is read once; every row gets the same keys and values.

    In mode `read` the question is read with the prompt, as the papers do it. In mode `fed` the prompt ends before the
    question, which is fed to the method one decode step a token: what the method dropped or left in DRAM before it
    knew the question is put to the test.

    \b
    coattn-lab eval tasks run --prompts p.jsonl.gz --out results/tasks \\
      --rows full,scout,budget=1024,streaming,gpu_share=1/8
    """
    from coattn_lab.evaluate.tasks.run import parse_rows

    rows = parse_rows(options["rows"], parse_settings)

    from coattn.units import parse_bytes
    from coattn_lab.evaluate.tasks import run as running
    from coattn_lab.evaluate.tasks.prompts import read_prompts

    found = read_prompts(Path(options["prompts"]))
    folder = Path(options["folder"])
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file.", "Give a folder to --out.")
    hold = parse_bytes(options["hold"], "hold")
    plan = running.plan(
        load_to_compare(options),
        found,
        modes=_words(options["modes"]),
        lengths=options["lengths"] or (),
        tasks=_words(options["names"]),
        limit=options["limit"],
        batch=options["batch"],
        chat=not options["raw"],
        whole=options["whole"],
        hold=hold,
    )
    started = time.perf_counter()
    total = sum(len(ask.ids) for ask in plan.asks) * (1 + len(rows) * len(plan.modes))
    with progress("tasks", total) as bar:
        done, failed = running.run(
            plan, rows, folder, lambda what, by: bar.update(bar.task_ids[0], description=what, advance=by)
        )
    err.print(f"wrote {len(done)} result(s) to {folder} in {time.perf_counter() - started:.0f} s", soft_wrap=True)
    if options["as_json"]:
        print_json({"results": done, "failed": {name: str(error) for name, error in failed.items()}})
    elif done:
        show(done)
    raise_failed(failed)


def show(results: list[dict[str, Any]]) -> None:
    """Scores for people: rows down; benchmark, mode and length across."""
    columns = list(dict.fromkeys((s["benchmark"], s["mode"], s["length"]) for each in results for s in each["scores"]))
    heads = " | ".join(f"{benchmark}\n{mode} {length:,}" for benchmark, mode, length in columns)
    table = empty_table(f"{results[0]['model']} ({results[0]['dtype']}), scores in percent", "row", heads)
    for each in results:
        by = {(s["benchmark"], s["mode"], s["length"]): s["score"] for s in each["scores"]}
        table.add_row(each["named"], *(f"{by[key]:.1f}" if key in by else "" for key in columns))
    out.print(table)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _is_ours(path: Path) -> bool:
    from coattn_lab.evaluate.tasks.prompts import read_prompts

    try:
        read_prompts(path)
    except InputError:
        return False
    return True
