"""`coattn calibrate`: files that a method reads, made from a model and a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.evaluate import load_model
from coattn.cli.options import Count, Number, count_option, join, json_option, model_options, text_option
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.errors import InputError
from coattn.text import Text, read_text
from coattn.units import format_bytes

if TYPE_CHECKING:
    from coattn.hf.load import Loaded


@click.group()
def calibrate() -> None:
    """Make the file that a method reads, once for each model."""


def shared_options(file: str, samples: Any = None) -> Callable[[Any], Any]:
    """--model to --json, the same for every file. samples: further options."""
    return join(
        model_options,
        text_option,
        *([] if samples is None else [samples, seed_option]),
        click.option("--out", "target", required=True, metavar="FILE", help=f"Write {file} to FILE."),
        json_option,
    )


def samples_option(default: int, what: str) -> Any:
    """--samples."""
    return count_option("--samples", default, f"Number of {what}.")


seed_option = count_option("--seed", 0, "Seed of the samples.", 0)


@contextmanager
def opened(options: dict[str, Any], what: str) -> Iterator[tuple[Loaded, Text, Path, Callable[[str, int, int], None]]]:
    """The model, the text, where the file goes, and what shows progress."""
    text, target = read_text(options["text_file"]), writable(options["target"])
    assert target is not None, "--out is required"
    loaded = load_model(options)
    with progress(what, None) as bar:

        def report(what: str, done: int, of: int) -> None:
            bar.update(bar.task_ids[0], description=what, completed=done, total=of)

        yield loaded, text, target, report


def show(options: dict[str, Any], report: dict[str, Any], line: str, method: str, name: str) -> None:
    """The result as --json says, and how to use the file."""
    if options["as_json"]:
        print_json(report)
        return
    out.print(f"{report[name]}: {line}", soft_wrap=True)
    err.print(f"use it with --method {method} --set {name}={report[name]}", soft_wrap=True)


@calibrate.command()
@shared_options("the codebook, a safetensors file,", samples_option(3, "pieces of the text"))
@count_option("--groups", None, "Groups of channels of a key.  [default: half the head size]")
@count_option("--centroids", 8192, "Centroids of a codebook.", 2, 1 << 15)
@click.option("--plain", is_flag=True, help="Code keys unchanged, as in the paper, instead of in a basis of their own.")
@click.option("--separate", is_flag=True, help="Make a codebook for each group instead of one for all.")
@count_option("--length", 8192, "Longest piece in tokens.")
def hcattention(**options: Any) -> None:
    """Make codebooks for product-quantised keys (HCAttention, section 3.1).

    The model reads samples of a text. The keys of each layer, after RoPE, are rotated to the basis in which coding
    changes the scores least, cut into groups of neighbouring channels, and clustered. Give the file to the method with
    `--set codebook=FILE`.
    """
    from coattn.hf.architectures import describe_layers
    from coattn.kernels.quantise.codebook import book_bytes
    from coattn.tools.calibrate.files import write_codebook

    shared, turned, count = not options["separate"], not options["plain"], options["centroids"]
    chosen = {name: options[name] for name in ("groups", "centroids", "samples", "length", "seed")}
    with opened(options, "calibrating") as (loaded, text, target, report):
        made = write_codebook(loaded, text, target, shared=shared, turned=turned, progress=report, **chosen)
    errors = [error(book, each.keys) for book, each in zip(made.books.values(), made.layers, strict=True)]
    found = {
        "codebook": str(target),
        "model": loaded.name,
        "text": text.name,
        "groups": made.groups,
        "centroids": count,
        "shared": shared,
        "tokens": made.tokens,
        "basis": turned,
        "relative_error": errors,
        "bytes": sum(book_bytes(s, made.groups, count, shared, turned) for s in describe_layers(loaded.model)),
    }
    line = (
        f"{len(errors)} layers, {made.groups} groups, {count:,} centroids, {format_bytes(found['bytes'])} of GPU "
        f"memory; the codes lose {sum(errors) / len(errors):.2%} of the keys' squared length"
    )
    show(options, found, line, "hcattention", "codebook")


@calibrate.command()
@shared_options("the labels, a JSON file,", samples_option(4, "prompts of each length"))
@click.option("--rho", type=Number(0, 1), help="Share of retrieval heads.  [default: 0.5; 0.25 without grouped heads]")
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=Count(1),
    help="Length of a prompt in tokens. May be repeated.  [default: 2048, 4096]",
)
@count_option("--sinks", 64, "Do not count the first tokens.", 0)
@count_option("--recent", 256, "Do not count the newest tokens.")
def duo(**options: Any) -> None:
    """Find retrieval heads (DuoAttention), by needle mass instead of training.

    The model reads prompts with up to ten pass keys, then questions and answers. The score of a KV head is the weight
    that its best query head gives to the requested pass key while the answer is read, without the first and the newest
    tokens. The heads with the best scores are retrieval heads. Give the file to the method with `--set heads=FILE`.
    """
    from coattn.hf.generate import positions
    from coattn.tools.calibrate.files import write_heads

    chosen = {name: options[name] for name in ("rho", "samples", "sinks", "recent", "seed")}
    with opened(options, "reading prompts") as (loaded, text, target, report):
        most = positions(loaded)
        if most is not None and max(options["lengths"], default=0) > most:
            asked = f"--length is {max(options['lengths']):,}, but {loaded.name} has only {most:,} positions."
            raise InputError(asked, f"Give {most:,} or less.")
        lengths = options["lengths"] or (2048, 4096)
        labels = write_heads(loaded, text, target, lengths=lengths, progress=report, **chosen)
    count, scores = sum(map(sum, labels.retrieval)), labels.scores
    total = sum(len(layer) for layer in labels.retrieval)
    known = [score for layer in scores for score in layer if score is not None]
    found = {"heads": str(target), "model": loaded.name, "retrieval": count, "rho": labels.rho, "scores": scores}
    line = f"{count} of {total} KV heads retrieve; needle mass {min(known):.4f} to {max(known):.4f}"
    show(options, found, line, "duo", "heads")


@calibrate.command()
@shared_options("the skew, a safetensors file,")
@count_option("--length", 2048, "Tokens of the text that are read.")
def infinigen(**options: Any) -> None:
    """Make a rotation for each KV head, after which a few columns of a key hold most of it (InfiniGen, section 4.1).

    The model reads the beginning of a text. The queries of the heads that share a KV head, after RoPE, are stacked and
    decomposed; columns are ranked by how large queries are in them. Give the file to the method with `--set skew=FILE`.
    """
    from coattn.tools.calibrate.files import write_skew

    with opened(options, "reading the text") as (loaded, text, target, _):
        made = write_skew(loaded, text, target, length=options["length"])
    kept = made.kept
    found = {"skew": str(target), "model": loaded.name, "text": text.name, "tokens": made.tokens, "kept": kept}
    line = (
        f"{len(kept)} layers, {made.tokens:,} tokens; a fifth of the columns holds {sum(kept) / len(kept):.1%} of the "
        "queries' squared length"
    )
    show(options, found, line, "infinigen", "skew")


def error(book: Any, keys: Any) -> float:
    """The share of the squared length of keys `[n, kv_heads, head_dim]` that their codes lose; over some of them."""
    some = keys[:: max(1, len(keys) // 1024)].float()
    lost = (book.decode(book.encode(some)) - some).square().sum()
    return float(lost / some.square().sum())
