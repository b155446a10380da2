"""`coattn calibrate`: files that a method reads, made from a model and a text."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.evaluate import load_model
from coattn.cli.options import Count, Number, json_option, model_options
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.errors import InputError
from coattn.text import read_text
from coattn.units import format_bytes


@click.group()
def calibrate() -> None:
    """Make what a method measures beforehand: once for each model, kept in a file."""


@calibrate.command()
@model_options
@click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python.")
@click.option("--groups", type=Count(1), help="Pieces of a key.  [default: half the head size]")
@click.option("--centroids", default=8192, show_default=True, type=Count(2, 1 << 15), help="Centroids of a codebook.")
@click.option("--plain", is_flag=True, help="Code keys as they are, as in the paper, not in a basis of their own.")
@click.option("--separate", is_flag=True, help="A codebook for each group instead of one for all.")
@click.option("--samples", default=3, show_default=True, type=Count(1), help="Stretches of the text.")
@click.option("--length", default=8192, show_default=True, type=Count(1), help="Tokens of each, at most.")
@click.option("--seed", default=0, show_default=True, type=Count(0), help="Where the draws start.")
@click.option("--out", "target", required=True, metavar="FILE", help="The codebook, a safetensors file.")
@json_option
def hcattention(**options: Any) -> None:
    """Codebooks for product-quantised keys (HCAttention, section 3.1).

    The model reads samples of a text; the keys of each layer, after RoPE, are turned to a basis in which what a code
    loses costs the scores least, cut into groups of neighbouring channels and clustered. `--set codebook=FILE` then
    gives them to the method.
    """
    text, target = read_text(options["text_file"]), writable(options["target"])
    assert target is not None, "--out is required"
    loaded = load_model(options)

    from coattn.hf.architectures import describe_layers
    from coattn.kernels.quantise.codebook import book_bytes
    from coattn.tools.calibrate.files import write_codebook

    shapes = describe_layers(loaded.model)
    shared, turned, count = not options["separate"], not options["plain"], options["centroids"]
    with progress("calibrating", None) as bar:

        def report(what: str, done: int, of: int) -> None:
            bar.update(bar.task_ids[0], description=what, completed=done, total=of)

        chosen = {name: options[name] for name in ("groups", "centroids", "samples", "length", "seed")}
        made = write_codebook(loaded, text, target, shared=shared, turned=turned, progress=report, **chosen)
    groups = made.groups
    found = {
        "codebook": str(target),
        "model": loaded.name,
        "text": text.name,
        "groups": groups,
        "centroids": options["centroids"],
        "shared": shared,
        "tokens": made.tokens,
        "basis": turned,
        "relative_error": [error(b, each.keys) for b, each in zip(made.books.values(), made.layers, strict=True)],
        "bytes": sum(book_bytes(s, groups, count, shared, turned) for s in shapes),
    }
    if options["as_json"]:
        print_json(found)
        return
    mean = sum(found["relative_error"]) / len(shapes)
    out.print(
        f"{target}: {len(shapes)} layers, {groups} groups, {options['centroids']:,} centroids, "
        f"{format_bytes(found['bytes'])} in the GPU tier; of the keys' squared length {mean:.2%} is lost",
        soft_wrap=True,
    )
    err.print(f"use it with --method hcattention --set codebook={target}", soft_wrap=True)


@calibrate.command()
@model_options
@click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python.")
@click.option("--rho", type=Number(0, 1), help="Share of retrieval heads.  [default: 0.5; 0.25 without grouped heads]")
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=Count(1),
    help="Tokens of a prompt; may be given again.  [default: 2048, 4096]",
)
@click.option("--samples", default=4, show_default=True, type=Count(1), help="Prompts of each length.")
@click.option("--sinks", default=64, show_default=True, type=Count(0), help="First tokens that do not count.")
@click.option("--recent", default=256, show_default=True, type=Count(1), help="Newest tokens that do not count.")
@click.option("--seed", default=0, show_default=True, type=Count(0), help="Where the draws start.")
@click.option("--out", "target", required=True, metavar="FILE", help="The labels, a JSON file.")
@json_option
def duo(**options: Any) -> None:
    """Retrieval heads (DuoAttention), by needle mass instead of training.

    The model reads prompts with up to ten pass keys in them, then questions and answers. The score of a KV head is the
    weight that its best query head gives, while an answer is read, to the pass key that is asked for, outside the
    first and the newest tokens. The best share of all heads are retrieval heads. `--set heads=FILE` then gives them to
    the method.
    """
    text, target = read_text(options["text_file"]), writable(options["target"])
    assert target is not None, "--out is required"
    loaded = load_model(options)

    from coattn.hf.generate import positions
    from coattn.tools.calibrate.files import write_heads

    most = positions(loaded)
    if most is not None and max(options["lengths"], default=0) > most:
        asked = f"--length is {max(options['lengths']):,}, but {loaded.name} has only {most:,} positions."
        raise InputError(asked, f"Give {most:,} or less.")

    chosen = {name: options[name] for name in ("rho", "samples", "sinks", "recent", "seed")}
    with progress("reading prompts", None) as bar:

        def report(what: str, done: int, of: int) -> None:
            bar.update(bar.task_ids[0], description=what, completed=done, total=of)

        lengths = options["lengths"] or (2048, 4096)
        labels = write_heads(loaded, text, target, lengths=lengths, progress=report, **chosen)
    scores = labels.scores
    found = sum(map(sum, labels.retrieval))
    if options["as_json"]:
        print_json(
            {"heads": str(target), "model": loaded.name, "retrieval": found, "rho": labels.rho, "scores": scores}
        )
        return
    total = sum(len(layer) for layer in labels.retrieval)
    known = [score for layer in scores for score in layer if score is not None]
    out.print(
        f"{target}: {found} of {total} KV heads retrieve; needle mass {min(known):.4f} to {max(known):.4f}",
        soft_wrap=True,
    )
    err.print(f"use it with --method duo --set heads={target}", soft_wrap=True)


@calibrate.command()
@model_options
@click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python.")
@click.option("--length", default=2048, show_default=True, type=Count(1), help="Tokens of the text that are read.")
@click.option("--out", "target", required=True, metavar="FILE", help="The skew, a safetensors file.")
@json_option
def infinigen(**options: Any) -> None:
    """A rotation for each KV head, after which a few columns of a key tell most (InfiniGen, section 4.1).

    The model reads the beginning of a text. The queries of the heads that share a KV head, after RoPE, are stacked and
    decomposed; columns are ranked by how large queries are in them. `--set skew=FILE` then gives them to the method.
    """
    text, target = read_text(options["text_file"]), writable(options["target"])
    assert target is not None, "--out is required"
    loaded = load_model(options)

    from coattn.tools.calibrate.files import write_skew

    with progress("reading the text", None):
        made = write_skew(loaded, text, target, length=options["length"])
    kept = made.kept
    report = {
        "skew": str(target),
        "model": loaded.name,
        "text": text.name,
        "tokens": made.tokens,
        "kept": kept,
    }
    if options["as_json"]:
        print_json(report)
        return
    out.print(
        f"{target}: {len(kept)} layers, {made.tokens:,} tokens; a fifth of the columns holds "
        f"{sum(kept) / len(kept):.1%} of the queries' squared length",
        soft_wrap=True,
    )
    err.print(f"use it with --method infinigen --set skew={target}", soft_wrap=True)


def error(book: Any, keys: Any) -> float:
    """The share of the squared length of keys `[n, kv_heads, head_dim]` that their codes lose; over some of them."""
    some = keys[:: max(1, len(keys) // 1024)].float()
    lost = (book.decode(book.encode(some)) - some).square().sum()
    return float(lost / some.square().sum())
