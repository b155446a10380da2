"""`coattn-lab bench ops`: the CPU core, each figure beside a limit measured in the same run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from coattn.cli.options import Count, Number, is_given, json_option, numbers
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn_lab.cli.groups import bench, empty_table

DTYPES = ("f32", "bf16", "f16", "int8", "int4")


@bench.command()
@click.option("--kernels", default="attend,weighted_sum", show_default=True, help="Which kernels.")
@click.option("--isas", help="Instruction sets with commas; default: the best here.")
@click.option(
    "--dtypes",
    default="bf16,int8,int4",
    show_default=True,
    help=f"Of {', '.join(DTYPES)}; weighted_sum alone takes int4.",
)
@click.option("--groups", default="1,4,5,8", show_default=True, callback=numbers, help="Query heads per KV head.")
@click.option("--head-sizes", default="128,64", show_default=True, callback=numbers, help="Head sizes.")
@click.option("--threads", callback=numbers, help="Numbers of threads; default: one per core.")
@click.option("--mib", default=2048, show_default=True, type=Count(16), help="KV memory to read per call.")
@click.option("--seconds", default=0.5, show_default=True, type=Number(0), help="Least time per row.")
@click.option("--no-torch", is_flag=True, help="Leave PyTorch out.")
@click.option("--quick", is_flag=True, help="Two groups, one head size, 256 MiB, unless other options say so.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def ops(target: str | None, as_json: bool, **options: Any) -> None:
    """The CPU kernels: KV GB/s beside the random-gather limit and beside PyTorch's attention on the same work."""
    path = writable(target)

    from coattn import native
    from coattn.provenance import provenance
    from coattn_lab.bench import ops as bench_ops

    if options["quick"]:
        short = {"groups": [1, 4], "head_sizes": [128], "mib": 256, "seconds": 0.2}
        options |= {name: value for name, value in short.items() if not is_given(name)}
    cases = plan(options, native, bench_ops)
    threads = sorted({case.threads for case in cases})
    nbytes = options["mib"] << 20
    rows = []
    with progress("kernels", len(cases)) as bar:
        for row in bench_ops.run(cases, nbytes, options["seconds"], not options["no_torch"]):
            rows.append(asdict(row))
            keep(path, rows=rows, mib=options["mib"])
            bar.advance(bar.task_ids[0])
    result = {
        "rows": rows,
        "limits": [{"threads": n, "stream_gbps": bench_ops.streaming_limit(n, nbytes)} for n in threads],
        "mib": options["mib"],
        **provenance(),
    }
    save(path, result)
    if as_json:
        print_json(result)
    else:
        show(result)


def plan(options: dict[str, Any], native: Any, bench_ops: Any) -> list[Any]:
    """Every case that was asked for; names that do not exist are refused."""
    kernels, dtypes = options["kernels"].split(","), options["dtypes"].split(",")
    isas = options["isas"].split(",") if options["isas"] else [native.isa()]
    reasons = native.isas()
    for what, names, known in (
        ("kernel", kernels, bench_ops.KERNELS),
        ("dtype", dtypes, DTYPES),
        ("instruction set", isas, reasons),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(f"There is no {what} {name!r}.", f"There is: {', '.join(known)}.")
    for name in isas:
        if reasons[name]:
            raise ConfigError(f"This machine cannot run the kernels for {name}: {reasons[name]}.", "Leave --isas out.")
    threads = options["threads"] or [native.default_threads()]
    cases = [
        bench_ops.Case(kernel, isa, dtype, group, head_size, count)
        for dtype in dtypes
        for head_size in options["head_sizes"]
        for kernel in kernels
        if dtype in bench_ops.DTYPES[kernel]
        for group in options["groups"]
        for isa in isas
        for count in threads
    ]
    if not cases:
        raise ConfigError(f"{options['kernels']} takes no {options['dtypes']}.", "Name another kernel or dtype.")
    return cases


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    title = f"{result['hardware']['cpu']}, {result['mib']} MiB of KV per call"
    heads = "group | head | threads | GB/s | limit | of limit | in turn | torch | x torch | error"
    table = empty_table(title, "kernel | isa | dtype", heads)
    for row in result["rows"]:
        peer = row["torch_tokens_per_s"]
        table.add_row(
            row["kernel"], row["isa"], row["dtype"], str(row["group"]), str(row["head_size"]), str(row["threads"]),
            f"{row['gbps']:.1f}", f"{row['limit_gbps']:.1f}", f"{row['gbps'] / row['limit_gbps']:.0%}",
            f"{row['share']:.0%}",
            "" if row["torch_gbps"] is None else f"{row['torch_gbps']:.1f}",
            "" if peer is None else f"{row['tokens_per_s'] / peer:.2f}",
            "" if row["error"] is None else f"{row['error']:.1e}",
        )  # fmt: skip
    out.print(table)
    for limit in result["limits"]:
        out.print(f"{limit['threads']} threads: streaming read {limit['stream_gbps']:.1f} GB/s", highlight=False)
