"""Write the table of README.md between its markers, from five results of `coattn-lab eval table`; and, from the table
`results/texts_30k.json` of `lab/scripts/results_gpu.py` if it is there, docs/results_shares.md and its picture.

Usage: python lab/scripts/make_results.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.units import format_bytes
from coattn_lab.evaluate.picture import curves
from coattn_lab.evaluate.results import fault, read_result
from coattn_lab.evaluate.tasks.table import lines, markdown, read_results

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "results/tasks_16k"
SHARES, PICTURE = "results/texts_30k.json", "docs/images/shares.svg"
MINI = "results/minilongbench.json"
BEHIND = "- [Results at other lengths and budgets](results_lengths.md)\n"
ENTRY = "- [Results at equal GPU memory](results_shares.md)\n"
METHODS = ("full", "auto", "hcattention", "scout", "hgca")
LENGTH = 16384
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEAD = (
    "method", "KV in GPU memory", "KV read in a step", "ms a step",
    "RULER, question fed", "RULER, question read", "needles, question fed", "KL", "file",
)  # fmt: skip


def main() -> None:
    """Replaces the block between the markers."""
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{block()}{END}{after}", encoding="utf-8")
    print("wrote README.md")
    if (ROOT / SHARES).exists():
        data = read_result(ROOT / SHARES)
        (ROOT / "docs" / "results_shares.md").write_text(shares_page(data, mini()), encoding="utf-8")
        (ROOT / PICTURE).write_text(picture(data["lines"]), encoding="utf-8")
        index = ROOT / "docs" / "index.md"
        text = index.read_text(encoding="utf-8")
        if "(results_shares.md)" not in text:
            index.write_text(text.replace(BEHIND, BEHIND + ENTRY, 1), encoding="utf-8")
        print(f"wrote docs/results_shares.md and {PICTURE}")


def block() -> str:
    """The table, and a sentence about how it was measured."""
    found = lines(read_results([ROOT / FOLDER]))
    rows = [cells(name, [line for line in found if line["row"].split(",")[0] == name]) for name in METHODS]
    data = read_result(ROOT / FOLDER / "full.json")
    why = fault(data)
    if why is not None:
        raise InputError(f"{FOLDER}/full.json may not be published: {why}.", "Make it again from a clean commit.")
    scored = sum(item["benchmark"] == "ruler" and item["mode"] == "fed" for item in data["items"])
    about = (
        f"{data['model'].split('@')[0]} in {data['dtype']} on one {data['hardware']['gpu']}, prompts of "
        f"{LENGTH:,} tokens, {data['runs'][str(LENGTH)]['batch']} sequences at a time. Methods other than `full` get "
        "12.5% of the KV cache as GPU memory. Scores are percentages with 95% intervals over "
        f"{scored} prompts of RULER's 13 tasks. KL is from `full`, in nats, along its answers. *Fed* means that the "
        "method sees the question only after the prompt was read. "
        f"Measured at commit {data['commit'][:7]}, {age(data['commit'])} commits before this table was written: the "
        "code and the defaults of `auto` have changed since. [All results, with their commands](results/README.md)."
    )
    return f"{markdown(HEAD, rows)}\n{about}\n"


def mini() -> dict[str, Any] | None:
    """The table of MiniLongBench, where it is there."""
    return read_result(ROOT / MINI) if (ROOT / MINI).exists() else None


def shares_page(data: dict[str, Any], tasks: dict[str, Any] | None) -> str:
    """The page of rows along texts, at equal GPU memory, and of MiniLongBench."""
    for why in (*data["faults"], *([] if tasks is None else tasks["faults"])):
        raise InputError(f"The results may not be published: {why}.", "Make them again from a clean commit.")
    found = sorted(data["lines"], key=lambda each: (each["budget"] or 0, each["answer_kl"]["kl"]))
    full = next(each for each in found if each["row"] == "full")
    best = {share: nearest(found, share) for share in sorted({each["budget"] for each in found if each["budget"]})}
    said = "; ".join(
        f"at {100 * share:g}% `{plain(each)}` ({each['answer_kl']['kl']:.2g})" for share, each in best.items()
    )
    kept = "; ".join(
        f"`{plain(each)}`, {each['gpu_share']:.0%} of it, {each['answer_kl']['kl']:.2g}" for each in found
        if each["budget"] is None and "gpu_dtype" in each["row"]
    )  # fmt: skip
    rows = [
        [
            f"`{plain(each)}`",
            "" if each["budget"] is None else f"{100 * each['budget']:g}%",
            f"{each['gpu_share']:.1%}",
            format_bytes(each["host_kv_bytes"]),
            "" if each["dram_tokens"] is None else f"{each['dram_tokens']:,.0f}",
            f"{each['ms_per_step']:.2f} ({each['p99_ms']:.2f})",
            f"{each['text']['score']:.1f}%",
            "" if each is full else f"{each['answer_kl']['kl']:.2g}{around(each['answer_kl']['kl_95'])}",
        ]
        for each in found
    ]
    head = (
        "row", "asked", "KV on the GPU", "KV in DRAM", "tokens read in DRAM", "ms a step (p99)", "same token",
        "KL (95%)",
    )  # fmt: skip
    asked = ", ".join(f"`{each['row']}`" for each in found if each["budget"])
    about = (
        f"{full['model'].split('@')[0]} in {full['dtype']} on one {data['hardware']['gpu']}: "
        f"{full['answer_kl']['prompts']} texts of {full['length']:,} tokens, read once and exactly; then "
        f"{full['answer_kl']['steps']} tokens of each, one a step, {full['batch']} sequences at a time. The "
        "milliseconds are of these very steps; KL is from full attention, in nats, with 95% intervals over the "
        "texts; *same token* says how often the likeliest token is full attention's. *Tokens read in DRAM* are of a "
        "sequence in a step, "
        f"averaged over layers and heads. Commit {data['commit'][:7]}, file [`{SHARES}`](../{SHARES})."
    )
    parts = (
        "# Results at equal GPU memory",
        f"Which method stays nearest to full attention on the same GPU bytes? In KL: {said}; in few bits {kept}.",
        "```sh\npython lab/scripts/results_gpu.py MODEL OUT --data MINILONGBENCH\n```",
        f"![KL against the share of the KV in GPU memory, a curve a method](images/{Path(PICTURE).name})",
        about,
        markdown(head, rows).rstrip(),
        f"Rows as they ran: {asked}.",
    )
    return "\n\n".join([*parts, *mini_part(tasks)]) + "\n"


def mini_part(tasks: dict[str, Any] | None) -> tuple[str, ...]:
    """MiniLongBench: the mean over datasets, and the difference to `full`, paired by prompt."""
    found = [] if tasks is None else [each for each in tasks["overall"] if each["benchmark"] == "minilongbench"]
    if not found:
        return ()
    rows = [
        [
            f"`{each['row']}`",
            "its own size" if each["budget"] is None else f"{100 * each['budget']:g}%",
            f"{each['score']:.1f}{points(each['score_95'])}",
            "" if each["difference"] is None else f"{each['difference']:+.1f}{points(each['difference_95'], '+')}",
        ]
        for each in found
    ]
    about = (
        f"{found[0]['items']} prompts of LongBench's {len(found[0]['tasks'])} datasets, the question read with the "
        "prompt, with its own scores; in brackets 95% intervals, differences paired by prompt. "
        f"File [`{MINI}`](../{MINI})."
    )
    head = ("row", "KV on the GPU", "MiniLongBench", "minus `full`")
    return "## MiniLongBench", about, markdown(head, rows).rstrip()


def points(spread: list[float] | None, sign: str = "") -> str:
    """` (-1.2 to +0.3)`."""
    return "" if spread is None else f" ({spread[0]:{sign}.1f} to {spread[1]:{sign}.1f})"


def nearest(found: list[dict[str, Any]], share: float) -> dict[str, Any]:
    """Of the rows sized to a share, the one of smallest KL; those that do not keep to it only where none does."""
    here = [each for each in found if each["budget"] == share]
    here = [each for each in here if each["budget_missed"] is None] or here
    return min(here, key=lambda each: each["answer_kl"]["kl"])


def plain(line: dict[str, Any]) -> str:
    """A row without the parameters that its budget has set."""
    return str(line["asked"])


def around(spread: list[float] | None) -> str:
    """` (0.01 to 0.03)`."""
    return "" if spread is None else f" ({spread[0]:.2g} to {spread[1]:.2g})"


def picture(found: list[dict[str, Any]]) -> str:
    """One curve a method: KL against the share of the KV in GPU memory."""
    of: dict[str, list[tuple[float, float]]] = {}
    for each in found:
        if each["row"] != "full":
            of.setdefault(plain(each), []).append((each["gpu_share"], max(1e-6, each["answer_kl"]["kl"])))
    return curves(of, "share of the KV cache in GPU memory", "KL from full attention, nats")


def cells(name: str, found: list[dict[str, Any]]) -> list[str]:
    """A row of the table: fed, read."""
    by = {line["mode"]: line for line in found if line["length"] == LENGTH}
    fed, read = by["fed"], by["read"]
    kl = fed["answer_kl"]
    return [
        f"`{name}`",
        f"{fed['gpu_share']:.0%}",
        f"{fed['read_share']:.0%}",
        f"{fed['ms_per_step']:.1f}",
        *(score(each) for each in (fed["ruler"], read["ruler"], fed["needle"])),
        "" if kl is None or name == "full" else f"{kl['kl']:.2g}",
        f"[json]({FOLDER}/{fed['files'][0]})",
    ]


def score(found: dict[str, Any]) -> str:
    """`51.5 (44.7 to 57.3)`."""
    spread = found["score_95"]
    return f"{found['score']:.1f}" + ("" if spread is None else f" ({spread[0]:.1f} to {spread[1]:.1f})")


def age(commit: str) -> int:
    """How many commits lie between a result and the present one."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
