"""`coattn eval`: what a method costs in quality."""

from __future__ import annotations

import json
from typing import Any

import click

from coattn.cli.options import json_option, method_options, model_options, parse_settings
from coattn.cli.output import err, model_progress, out, print_json, progress, writable
from coattn.errors import InputError
from coattn.text import read_text


def shared_options(command: Any) -> Any:
    """Options of every evaluation that forces a text through a model."""
    for option in (
        json_option,
        click.option("--out", "target", metavar="FILE", help="Also write the JSON there, and a figure beside it."),
        click.option(
            "--decode",
            default=128,
            show_default=True,
            type=click.IntRange(1),
            help="Last tokens, one decode step each.",
        ),
        click.option("--length", default=2048, show_default=True, type=click.IntRange(4), help="Tokens of the text."),
        click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python."),
        method_options(),
        model_options,
    ):
        command = option(command)
    return command


@click.group("eval")
def evaluate() -> None:
    """Measure what a method costs in quality, against full attention in the same run.

    The first tokens of a text are prefilled exactly; the last ones (--decode) are read one decode step at a time under
    the method, whatever it would have said itself.
    """


@evaluate.command()
@shared_options
def perplexity(**options: Any) -> None:
    """Perplexity of a text, over all of it and over the decode steps alone."""
    run("perplexity", options)


@evaluate.command()
@shared_options
def fidelity(**options: Any) -> None:
    """KL divergence and top-1 agreement of the predictions with those of full attention."""
    run("fidelity", options)


def run(
    kind: str,
    options: dict[str, Any],
) -> None:
    """Both evaluations: force the text under the method and under full attention, compare, report."""
    from coattn.method import compose
    from coattn.methods import find_method

    params, row = parse_settings(options["settings"]), find_method(options["method"])
    composed = compose(row, **params)
    text, target = read_text(options["text_file"]), writable(options["target"])

    from coattn.evaluate import fidelity, figures, perplexity
    from coattn.evaluate.forced import force
    from coattn.hf.generate import positions
    from coattn.hf.load import choose_device, load
    from coattn.provenance import provenance

    with model_progress() as show:
        device = choose_device(options["device"])
        # on the CPU float32: rounding to bfloat16 costs more (KL about 1e-3) than some methods do
        dtype = "float32" if options["dtype"] == "auto" and device.type == "cpu" else options["dtype"]
        loaded = load(options["model"], dtype=dtype, device=device, on_progress=show)
    length, limit = options["length"], positions(loaded)
    if limit is not None and length > limit:
        raise InputError(
            f"--length is {length:,}, but {loaded.name} has only {limit:,} positions.",
            f"Give --length {limit} or less.",
        )
    ids = loaded.tokenizer(text.body, return_tensors="pt", verbose=False).input_ids[0][:length]
    if len(ids) < length:
        raise InputError(
            f"{text.name} has only {len(ids):,} tokens, but --length is {length:,}.",
            f"Give --length {len(ids)} or less.",
        )
    if options["decode"] >= length:
        raise InputError(
            f"--decode is {options['decode']:,}, but --length is only {length:,}.", "Leave some tokens to prefill."
        )
    prefill = length - options["decode"]

    def forced(method: Any, label: str, **more: Any) -> Any:
        with progress(label, length) as bar:
            return force(
                loaded.model,
                ids,
                prefill,
                method,
                progress=lambda done, _: bar.update(bar.task_ids[0], completed=done),
                **more,
            )

    own = forced(row, row.name, gpu_kv=options["gpu_kv"], host_kv=options["host_kv"], **params)
    # the table's own full attention is its own reference: the same run, not a second one
    full = own if row.name == "full" and not params else forced("full", "full attention")
    compare = perplexity.compare if kind == "perplexity" else fidelity.compare
    result = {
        **compare(own, full),
        "evaluation": kind,
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "text": {"name": text.name, "sha256": text.sha256},
        "length": length,
        "prefill": prefill,
        "row": {"store": row.store, "select": row.select, "place": list(row.place), "schedule": row.schedule},
        **own.report,
        **provenance(),
    }
    if target is not None:
        target.write_text(json.dumps(result, indent=2, default=str) + "\n")
        figure = target.with_suffix(".png")
        figures.steps(kind, row.name, own, full, figure)
        err.print(f"wrote {target} and {figure}")
    if options["as_json"]:
        print_json(result)
    else:
        out.print(summary(kind, result, composed.exact), highlight=False)


def summary(kind: str, result: dict[str, Any], exact: bool) -> str:
    """Two lines for people."""
    where = f"{result['model']} ({result['dtype']}), {result['length']:,} tokens of {result['text']['name']}"
    what = f"{result['method']} ({'exact' if exact else 'lossy'})"
    if kind == "fidelity":
        return (
            f"{what}: KL {result['kl']:.3g} (worst step {result['kl_max']:.3g}), top-1 agreement {result['top1']:.2%} "
            f"with full attention over {result['steps']} decode steps\n{where}"
        )
    decode = result.get("decode", {})
    return (
        f"{what}: perplexity {result['perplexity']:.4f}, full attention {result['perplexity_full']:.4f}, "
        f"ratio {result['ratio']:.4f}; over the {decode.get('tokens', 0)} tokens scored after decode steps alone "
        f"{decode.get('perplexity', float('nan')):.4f}, ratio {decode.get('ratio', float('nan')):.4f}\n{where}"
    )
