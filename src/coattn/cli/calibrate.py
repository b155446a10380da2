"""`coattn calibrate`: files that a method reads, made from a model and a text."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from coattn.cli.evaluate import load_to_compare
from coattn.cli.options import Count, Number, count_option, join, json_option, model_options, text_option
from coattn.cli.output import print_json, print_line, tell, writable
from coattn.progress import progress_line
from coattn.text import read_text
from coattn.units import format_bytes


@click.group()
def calibrate() -> None:
    """Make the file that a method reads, once for each model."""


def shared_options(file: str, *more: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """--model to --json, the same for every file."""
    return join(
        model_options,
        text_option,
        *more,
        click.option("--out", "target", required=True, metavar="FILE", help=f"Write {file} to FILE."),
        json_option,
    )


def samples(default: int, what: str) -> Sequence[Callable[[Any], Any]]:
    """--samples and --seed."""
    return count_option("--samples", default, f"Number of {what}."), count_option(
        "--seed", 0, "Seed of the samples.", 0
    )


def run(options: dict[str, Any], write: Callable[..., dict[str, Any]], **chosen: Any) -> dict[str, Any]:
    """Loads the model and writes the file, with a bar that shows how far it is -> what was found."""
    text, target = read_text(options["text_file"]), writable(options["target"])
    loaded = load_to_compare(options)
    with progress_line() as report:
        return write(loaded, text, target, progress=report, **chosen)


def show(options: dict[str, Any], report: dict[str, Any], line: str, method: str, name: str) -> None:
    """The result as --json says, and how to use the file."""
    if options["as_json"]:
        print_json(report)
        return
    print_line(f"{report[name]}: {line}")
    tell(f"use it with --method {method} --set {name}={report[name]}")


@calibrate.command()
@shared_options("the codebook, a safetensors file,", *samples(3, "pieces of the text"))
@count_option("--groups", None, "Groups of channels of a key.  [default: half the head size]")
@count_option("--centroids", 8192, "Centroids of a codebook.", 2, 1 << 15)
@click.option("--plain", is_flag=True, help="Code keys unchanged, as in the paper, instead of in a basis of their own.")
@count_option("--length", 8192, "Longest piece in tokens.")
def hcattention(**options: Any) -> None:
    """Make codebooks for product-quantised keys (HCAttention, section 3.1).

    The model reads samples of a text. The keys of each layer, after RoPE, are rotated to the basis in which coding
    changes the scores least, cut into groups of neighbouring channels, and clustered. Give the file to the method with
    `--set codebook=FILE`.
    """
    from coattn.tools.calibrate.codebooks import write_codebook

    chosen = {name: options[name] for name in ("groups", "centroids", "samples", "length", "seed")}
    made = run(options, write_codebook, turned=not options["plain"], **chosen)
    errors = made["relative_error"]
    line = (
        f"{len(errors)} layers, {made['groups']} groups, {made['centroids']:,} centroids, "
        f"{format_bytes(made['bytes'])} of GPU memory; the codes lose {sum(errors) / len(errors):.2%} of the keys' "
        "squared length"
    )
    show(options, made, line, "hcattention", "codebook")


@calibrate.command()
@shared_options("the labels, a JSON file,", *samples(4, "prompts of each length"))
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
    from coattn.tools.calibrate.heads import write_heads

    chosen = {name: options[name] for name in ("rho", "lengths", "samples", "sinks", "recent", "seed")}
    made = run(options, write_heads, **chosen)
    total = sum(map(len, made["scores"]))
    known = [score for layer in made["scores"] for score in layer if score is not None]
    line = f"{made['retrieval']} of {total} KV heads retrieve; needle mass {min(known):.4f} to {max(known):.4f}"
    show(options, made, line, "duo", "heads")


@calibrate.command()
@shared_options("the skew, a safetensors file,")
@count_option("--length", 2048, "Tokens of the text that are read.")
def infinigen(**options: Any) -> None:
    """Make a rotation for each KV head, after which a few columns of a key hold most of it (InfiniGen, section 4.1).

    The model reads the beginning of a text. The queries of the heads that share a KV head, after RoPE, are stacked and
    decomposed; columns are ranked by how large queries are in them. Give the file to the method with `--set skew=FILE`.
    """
    from coattn.tools.calibrate.skews import write_skew

    made = run(options, write_skew, length=options["length"])
    kept = made["kept"]
    line = (
        f"{len(kept)} layers, {made['tokens']:,} tokens; a fifth of the columns holds {sum(kept) / len(kept):.1%} of "
        "the queries' squared length"
    )
    show(options, made, line, "infinigen", "skew")


@calibrate.command()
@shared_options("how keys spread, a safetensors file,")
def auto(**options: Any) -> None:
    """Measure how a model's keys spread, on a text of your own.

    By that, `auto` gives every channel of a key as many bits as pay. An engine measures it by itself, once for each
    model, on a text that ships with Python. Give the file to the method with `--set sketch=FILE`.
    """
    from coattn.hf.sketches import write_sketch

    made = run(options, write_sketch)
    show(options, made, f"{made['layers']} layers, {made['tokens']:,} tokens", "auto", "sketch")
