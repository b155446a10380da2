"""Write docs/figures.md: every figure and table of the papers with its command, its result, and whether both agree.

The sentences are made from the numbers of the result files. Where a file is not there, the line says why.
Usage: python scripts/make_figures.py [--check]
"""

# ruff: noqa: E501 - lines are those of the page
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "figures.md"
Data = Mapping[str, Any]
NO_TIME = "no result yet"
LATER = "The command is there; it has not been run from a clean commit, for want of time on a machine with a GPU."


@dataclass(frozen=True)
class Line:
    """One figure or table. files: in order of preference; said: makes the sentence of the file that is there."""

    name: str
    command: str
    files: Sequence[str] = ()
    said: Callable[[Data], str] = lambda _: ""
    without: tuple[str, str] = (NO_TIME, LATER)
    """Result and sentence where no file is there."""

    def cells(self, results: Path) -> list[str]:
        file = next((name for name in self.files if (results / name).exists()), None)
        if file is None:
            return [self.name, self.command, *self.without]
        data = json.loads((results / file).read_text(encoding="utf-8"))
        return [self.name, self.command, f"[{file}](../results/{file})", self.said(data)]


def _does(agrees: bool) -> str:
    return "It does" if agrees else "It does not"


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _rows_of(data: Data, method: str) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if row["method"] == method]


def _ms(data: Data, method: str, **wanted: Any) -> float:
    return next(
        float(row["ms_per_step"]) for row in _rows_of(data, method) if all(row[k] == v for k, v in wanted.items())
    )


def _subject(data: Data) -> str:
    return f"{data['model']} at {data['length']:,} tokens"


# HGCA


def _hgca_table1(data: Data) -> str:
    rows = _rows_of(data, "hgca-paper")
    ratios, kls = [row["ratio"] for row in rows], [row["kl"] for row in rows]
    worst = max(rows, key=lambda row: row["kl"])
    return (
        f"{_does(max(ratios) < 1.02)}: on {_subject(data)} perplexity is {min(ratios):.3f} to {max(ratios):.3f} of full "
        f"attention's over {len(rows)} cells. KL says more: {min(kls):.2g} to {max(kls):.2g}, the most with "
        f"`{worst['row'].partition(',')[2]}`, so window and beta do matter."
    )


def _hgca_fig3(data: Data) -> str:
    ends = data["ends"]
    start, recent = ends["starts"].index(4), ends["recents"].index(256)
    first, middle, last = (ends["mass"][i][start][recent] for i in (0, len(ends["mass"]) // 2, -1))
    alone = [layer[start][0] - layer[0][0] for layer in ends["mass"]]
    return (
        f"{_does(middle > first)} as to entry layers, on {_subject(data)}: the first 4 and the last 256 tokens hold {first:.0%} of the mass in "
        f"the first layer, {middle:.0%} in the middle one and {last:.0%} in the last. The first 4 alone hold "
        f"{min(alone):.0%} to {max(alone):.0%} by layer."
    )


def _hgca_fig4(data: Data) -> str:
    shares = data["locality"]["share"]
    middle = shares[len(shares) // 2]
    return (
        f"{_does(max(middle) > 4 * min(middle))}, on {_subject(data)}: in the middle layer heads need {min(middle):.1%} to {max(middle):.1%} of "
        f"the entries for 99% of the mass; in all layers {min(map(min, shares)):.1%} to {max(map(max, shares)):.1%}."
    )


def _hgca_fig5(data: Data) -> str:
    moved = data["moved"]
    still, same = _mean(moved["still_top"]), _mean(moved["correlation"])
    return (
        f"{_does(True) if still > 0.7 else 'In part it does' if still > 0.3 else _does(False)}, on {_subject(data)}: of the heaviest {moved['top']:.0%} of the entries {still:.0%} still are so at the last "
        f"decode step, and the weights of both steps correlate by {same:.2f}. The paper shows one head; here it is the "
        "mean of all."
    )


def _hgca_fig6(data: Data) -> str:
    batches = sorted({row["batch"] for row in data["rows"]})
    pairs = [(b, _ms(data, "offload", batch=b), _ms(data, "cpu", batch=b)) for b in batches]
    told = "; ".join(f"{cpu:.0f} ms where loading takes {load:.0f}, batch {b}" for b, load, cpu in pairs)
    return f"{_does(all(cpu < load for _, load, cpu in pairs))}: a step that attends where the KV lies takes {told}."


def _hgca_fig10(data: Data) -> str:
    found = {}
    for row in _rows_of(data, "cpu"):
        other = next(
            each for each in _rows_of(data, "offload")
            if (each["context"], each["batch"], each["params"]) == (row["context"], row["batch"], row["params"])
        )  # fmt: skip
        found[row["params"]["window_blocks"] * 32] = other["ms_per_step"] / row["ms_per_step"]
    told = ", ".join(f"{times:.2f} times with {tokens:,} tokens on the GPU" for tokens, times in sorted(found.items()))
    return f"{_does(min(found.values()) > 1)}: hybrid attention over loading, steps of batch 4: {told}."


def _hgca_fig11(data: Data) -> str:
    rows = _rows_of(data, "hgca")
    told = "; ".join(
        f"batch {row['batch']}, {row['kept_share']:.0%} kept: {row['ms_per_step']:.1f} ms, {row['gpu_idle']:.0%} of them "
        "waiting" for row in rows
    )  # fmt: skip
    return f"It does in kind: the CPU's part is the long one ({told}); merging is not seen."


def _hgca_fig12(data: Data) -> str:
    by = {row["method"]: row["ms_per_step"] for row in data["rows"]}
    told = ", ".join(f"`{name}` {value:.1f}" for name, value in sorted(by.items(), key=lambda each: each[1]))
    return (
        f"{_does(by['hgca'] < by['offload'])} as to loading: ms a step {told}. `h2o` drops what it does not keep here and loads "
        "nothing, so it is fast; FlexGen's form loads. OPT-30B and 66B are not run."
    )


def _by_length(data: Data) -> str:
    own = {row["context"]: row["ms_per_step"] for row in _rows_of(data, "hgca")}
    full = {row["context"]: row["ms_per_step"] for row in _rows_of(data, "full")}
    told = ", ".join(f"{own[c]:.1f} and {full[c]:.1f} at {c:,}" for c in sorted(own) if c in full)
    first, last = min(own), max(own)
    return (
        f"It does in kind: ms a step of `hgca` and of `full`: {told}. `hgca` grows by {own[last] / own[first]:.1f} times "
        "and its GPU memory does not. Lengths are measured one by one, not as one answer grows; lists are assumed."
    )


# ScoutAttention


def _scout_table1(data: Data) -> str:
    found = data["query_ahead"]
    both, neither = found["norm_rope"]["mean"], found["neither"]["mean"]
    return (
        f"{_does(both >= 0.93)}, on {_subject(data)}: cosine {both:.3f} with norm and RoPE (paper 0.93 to 0.97), {neither:.3f} with neither. Its five "
        "models cannot be had here."
    )


def _scout_fig2(data: Data) -> str:
    found = {int(size): rate for size, rate in data["found"].items()}
    small, large = min(found), max(found)
    return (
        f"It does in kind: pieces of {small} bytes come at {found[small]:.1f} GB/s, of {large // 1024} KiB at "
        f"{found[large]:.1f}. A kernel gathers them here; the paper copies them one by one."
    )


def _scout_waits(data: Data) -> str:
    most = max(row["batch"] for row in data["rows"])
    by = {row["method"]: row["gpu_idle"] for row in data["rows"] if row["batch"] == most}
    told = ", ".join(f"`{name}` {value:.0%}" for name, value in sorted(by.items(), key=lambda each: each[1]))
    return (
        f"{_does(min(by, key=lambda n: by[n]) == 'scout')}: the GPU waits, batch {most}: {told} (paper 6%, 57%, 61%)."
    )


def _scout_fig6(data: Data) -> str:
    own, without = data["found"]["recall"], data["found"]["without"]
    return (
        f"{'As to recall it does, not as to the share' if own['mean'] < without['mean'] else 'It does not'}: on {data['model']} the CPU has {own['mean']:.0%} of the budget in the mean with "
        f"recall, {own['steps'][-1]:.0%} in the last step; without {without['mean']:.0%} and {without['steps'][-1]:.0%} (paper "
        "8.2% with it)."
    )


def _scout_fig8(data: Data) -> str:
    by = {row["method"]: (row["tokens_per_s"], row["batch"]) for row in data["rows"]}
    own = by["scout"][0]
    told = ", ".join(f"{own / rate:.2f} times `{n}` (batch {b})" for n, (rate, b) in by.items() if n != "scout")
    return f"{_does(all(own > rate for n, (rate, _) in by.items() if n != 'scout'))}: `scout` at batch {by['scout'][1]}: {told}."


def _scout_fig9(data: Data) -> str:
    by = {row["batch"]: row["tokens_per_s"] for row in _rows_of(data, "scout")}
    few, most = min(by), max(by)
    return f"It does in kind: batch {few} to {most} gives {by[most] / by[few]:.2f} times the tokens (paper 1.78 from 16 to 32)."


def _scout_fig10(data: Data) -> str:
    by = {row["params"]["block"]: row["tokens_per_s"] for row in _rows_of(data, "scout")}
    told = ", ".join(f"{rate:.0f} with {block}" for block, rate in sorted(by.items()))
    return f"{_does(by[32] >= by[16])} as to small blocks: tokens/s by tokens of a block: {told}."


def _scout_fig12(data: Data) -> str:
    def rate(ahead: bool, recall: bool) -> float:
        for row in data["rows"]:
            is_ahead = "schedule" not in row["params"]
            if (is_ahead, bool(row["params"]["recall_interval"])) == (ahead, recall):
                return float(row["tokens_per_s"])
        return float("nan")

    base = rate(False, False)
    alone, both, recall = rate(True, False) / base, rate(True, True) / base, rate(False, True) / base
    return (
        f"{_does(both > max(alone, recall))}: beside neither, pre-computation alone {alone:.2f} times (paper 1.39), recall alone "
        f"{recall:.2f}, both {both:.2f} (paper 1.39 x 1.20)."
    )


# HCAttention


def _hc_table3(data: Data) -> str:
    told = ", ".join(
        f"{row['row']}: {row['share_attended']:.1%} and {row['against_full']['ratio']:.3f}" for row in data["rows"]
    )
    near = next(row for row in data["rows"] if row["row"] == "tau 0.9")
    return f"{_does(near['against_full']['ratio'] < 1.02)}: tokens kept and perplexity beside full: {told} (paper 15.6% at 0.9)."


def _hc_fig3(data: Data) -> str:
    row = next(row for row in data["rows"] if row["row"] == "tau 0.9")
    layers = row["share_attended_layers"]
    return (
        f"{_does(layers[0] > _mean(layers))}: with tau 0.9 the first layer keeps {layers[0]:.0%}, the others "
        f"{min(layers[1:]):.0%} to {max(layers[1:]):.0%}."
    )


def _hc_table4(data: Data) -> str:
    rows = [row for row in data["rows"] if row["method"] == "hcattention-paper"]
    told = ", ".join(f"`{row['row'].partition(',')[2].replace('tau=1,', '')}` {row['kl']:.2g}" for row in rows)
    return f"{_does(rows[0]['kl'] >= rows[-1]['kl'])} as to more centroids and groups: KL {told}; codebooks are of the prompt."


def _hc_fig4(data: Data) -> str:
    found = data.get("found", data)
    return (
        f"It does: weights from codes correlate with those from keys by {min(found['correlation']):.3f} to "
        f"{max(found['correlation']):.3f} by layer; {_mean(found['moved']):.1%} of the mass lies elsewhere in the mean."
    )


def _hc_blocks(data: Data) -> str:
    lengths = ", ".join(f"{each['found']} of {each['total']} at {each['length']:,}" for each in data["by_length"])
    return f"Pass keys found, prompts read in blocks of 4,096 after an anchor block: {lengths}. The paper has no such figure."


SMALL = "`coattn eval attention --model smollm2 --dtype float32 --prefill 4064 --decode 32 --budget 1024`"
LONG = "`coattn eval attention --model MODEL --dtype bfloat16 --prefill 32000 --decode 32 --budget 2048`"
ATTENTION = ("attention_qwen_32k.json", "attention_smollm2_4k.json")
LLAMA = "--shapes llama-2-7b"
SCOUT = "--shapes qwen3-8b --context 16384"

HGCA = [
    Line(
        "Table 1",
        '`coattn eval sweep "hgca-paper,window_blocks=64|128|192,beta=0.25|0.5|1" --model MODEL --prefill 7936 --decode 256`',
        ("hgca_table1_qwen_8k.json", "hgca_table1_smollm2_2k.json"),
        _hgca_table1,
        (
            "one cell: [sweep at 16k](../results/sweep_qwen2.5_coder_16k.json), row `hgca-paper`",
            "In its one cell, a window of a quarter and beta 1, it does: perplexity 0.972 of full attention's; KL says more, 0.044.",
        ),
    ),
    Line("Figure 3", f"{LONG} (`ends`)", ATTENTION, _hgca_fig3),
    Line("Figure 4", "the same (`locality`)", ATTENTION, _hgca_fig4),
    Line("Figure 5", "the same (`moved`)", ATTENTION, _hgca_fig5),
    Line(
        "Figure 6",
        f"`coattn bench hgca --figure 6 {LLAMA} --batch 1,4 --context 4096`",
        ("hgca_fig6_llama2_7b.json",),
        _hgca_fig6,
        (
            "with shared KV heads: [decode at 32k](../results/decode_qwen3_8b_32k.json), rows `offload` and `cpu`",
            "It does: attending where the KV lies takes 179 ms where loading it takes 382.",
        ),
    ),
    Line(
        "Figure 10",
        f"`coattn bench hgca --figure 10 {LLAMA} --batch 4 --context 4096 --window 2048`",
        ("hgca_fig10_llama2_7b.json",),
        _hgca_fig10,
    ),
    Line(
        "Figure 11",
        f"`coattn bench hgca --figure 11 {LLAMA} --batch 1,4 --context 4096 --window 1024 --kept 0.02,0.25`",
        ("hgca_fig11_llama2_7b.json",),
        _hgca_fig11,
    ),
    Line(
        "Figure 12",
        "`coattn bench hgca --figure 12 --shapes opt-6.7b --batch 4 --context 2048 --window 512 --kept 0.25 --peers`",
        ("hgca_fig12_opt_6.7b.json",),
        _hgca_fig12,
        (
            "with shared KV heads: [`hgca`](../results/decode_qwen3_8b_32k_hgca.json) and "
            "[`offload`](../results/decode_qwen3_8b_32k.json) at 32k",
            "In its order it does: 87 ms against 382 by loading, with 67.5% of the entries kept.",
        ),
    ),
    Line(
        "Figure 13",
        f"`coattn bench hgca --figure 13 {LLAMA} --batch 1 --context 1024,2048,4096,8192 --window 512 --kept 0.25`",
        ("hgca_fig13_llama2_7b.json",),
        _by_length,
    ),
    Line(
        "Figure 15",
        "`coattn bench hgca --figure 15 --shapes gpt-neox-20b --batch 1 --context 4096,16384 --window 4096 --kept 0.25`",
        ("hgca_fig15_neox_20b.json",),
        _by_length,
    ),
]
SCOUT_LINES = [
    Line("Table 1", f"{LONG} (`query_ahead`)", ATTENTION, _scout_table1),
    Line("Figure 2", "`coattn bench scout --figure 2`", ("scout_fig2.json",), _scout_fig2),
    Line(
        "Figure 3",
        f"`coattn bench scout --figure 3 {SCOUT} --batch 8,16 --change 0.19`, the rows of Figure 11",
        ("scout_fig11_16k.json",),
        _scout_waits,
        (
            "`scout` alone: [decode at 32k](../results/decode_qwen3_8b_32k_scout.json)",
            "It does: `scout` waits 19% of a step, `hgca` 93% in [its own run](../results/decode_qwen3_8b_32k_hgca.json).",
        ),
    ),
    Line(
        "Figure 6",
        "`coattn bench scout --figure 6 --model MODEL --prefill 30720 --decode 128`",
        ("scout_fig6_qwen_32k.json", "scout_fig6_smollm2_4k.json"),
        _scout_fig6,
    ),
    Line(
        "Figure 7",
        "`coattn eval longbench --method scout --set budget=1024`",
        without=(
            "cannot be had",
            "LongBench's files and Qwen3-8B's weights are not there; [tasks](results.md) stand in for them.",
        ),
    ),
    Line(
        "Figure 8",
        f"`coattn bench scout --figure 8 {SCOUT} --methods full,hgca,infinigen,scout --batch 16 --gpu-memory 40GiB --change 0.19`",
        ("scout_fig8_16k.json",),
        _scout_fig8,
        (
            "at one batch: [decode at 32k](../results/decode_qwen3_8b_32k_scout.json)",
            "At batch 4 `scout` makes 1.17 times `full`'s tokens; the paper's 5.1 comes from larger batches.",
        ),
    ),
    Line(
        "Figure 9",
        f"`coattn bench scout --figure 9 {SCOUT} --batch 8,16 --change 0.19`, the rows of Figure 11",
        ("scout_fig11_16k.json",),
        _scout_fig9,
    ),
    Line(
        "Figure 10",
        f"`coattn bench scout --figure 10 {SCOUT} --batch 8 --gpu-memory 40GiB --change 0.19`",
        ("scout_fig10_16k.json",),
        _scout_fig10,
    ),
    Line(
        "Figure 11",
        f"`coattn bench scout --figure 11 {SCOUT} --batch 8,16 --change 0.19`",
        ("scout_fig11_16k.json",),
        _scout_waits,
    ),
    Line(
        "Figure 12",
        f"`coattn bench scout --figure 12 {SCOUT} --batch 8 --set ahead_from=1 --change 0.19`",
        ("scout_fig12_16k.json",),
        _scout_fig12,
    ),
]
HC = [
    Line(
        "Table 1",
        "`coattn plan --shapes llama-3-8b --method hcattention --set groups=64 --set code_bits=16 --context 131072`",
        without=(
            "exact, by the cache's own ledger; tests hold it",
            "It does: 25% with 64 groups of a head of 128, 12.5% with 32, and codebook and window on top. Its part (b) is arithmetic.",
        ),
    ),
    Line(
        "Table 2",
        "`coattn eval longbench --method hcattention`",
        without=(
            "cannot be had",
            "LongBench's files and both models are not there; [tasks](results.md) stand in for them.",
        ),
    ),
    Line(
        "Table 3",
        "`coattn bench hcattention --table 3 --model MODEL --length 16256 --decode 128`",
        ("hcattention_table3_qwen_16k.json", "hcattention_table3_smollm2_8k.json"),
        _hc_table3,
        (
            "one cell, with codes: [sweep at 16k](../results/sweep_qwen2.5_coder_16k.json), row `hcattention-paper`",
            "At tau 0.9 it keeps 13.1% of the tokens (paper 15.6%) at 0.992 of full attention's perplexity and a KL of 0.017.",
        ),
    ),
    Line(
        "Table 4",
        '`coattn eval sweep "hcattention-paper,tau=1,groups=16|32,centroids=256|1024|4096|8192" --model MODEL --prefill 8064 --decode 128`',
        ("hcattention_table4_qwen_8k.json", "hcattention_table4_smollm2_2k.json"),
        _hc_table4,
    ),
    Line(
        "Figure 2",
        "`coattn eval table --rows full,hcattention,duo --budget 12.5%,25% --prompts needles.jsonl.gz --model MODEL --out needles.json`",
        without=(
            "needles in the [tasks at 16k](../results/tasks_16k/full.json), [beside the other rows](results.md)",
            "It does with a calibrated codebook, as far as the few needles there tell; with a codebook of one prompt it does not.",
        ),
    ),
    Line(
        "Figure 3",
        "as Table 3 (`share_attended_layers`)",
        ("hcattention_table3_qwen_16k.json", "hcattention_table3_smollm2_8k.json"),
        _hc_fig3,
    ),
    Line(
        "Figure 4",
        "`coattn eval codes --model MODEL --codebook book.safetensors`",
        ("hcattention_fig4_qwen.json", "hcattention_fig4_smollm2.json"),
        _hc_fig4,
    ),
    Line("Appendix A", "as Figure 2: the same command asks all three needles", without=("as Figure 2", "As Figure 2.")),
    Line(
        "Appendix B",
        "`coattn eval needle --model MODEL --method hcattention --set prefill_block=4096 --set anchor=4096 --lengths 8192,16384`",
        ("hcattention_blocks_qwen_16k.json",),
        _hc_blocks,
    ),
]
HEAD = """# The papers' figures

Every figure and table of the three papers that measures something: the command that makes it here, its result, and whether the two agree. Hardware and models are not those of the papers: an H200 with 16 cores where they have
A6000, A100 or H20; Qwen2.5-Coder-0.5B (2 KV heads of 64, 32,768 positions) or SmolLM2-135M where a figure needs real weights. Commands of `bench` run random weights in the shapes that they name; rows of `scout` then have
driven picks (`--change`), rows of `hgca` assumed lists (`--kept`), and each result says so. `MODEL` stands for the long-context model's file. A file's own command is in it, and may be of a smaller size than the line's.

[scripts/figures_gpu.sh](../scripts/figures_gpu.sh) runs the commands; [scripts/results_gpu.sh](../scripts/results_gpu.sh) makes the [table on tasks](results.md). `python scripts/make_figures.py` makes this page of the files.
"""
PARTS = (
    ("HGCA", HGCA, "Figures 1, 2 and 7 to 9 are drawings. Figure 14 needs two and four GPUs, which are not there."),
    ("ScoutAttention", SCOUT_LINES, "Figures 1, 4 and 5 are drawings."),
    ("HCAttention", HC, "Figure 1, and Figure 3 of the appendix, are drawings."),
)


def page(results: Path) -> str:
    """The whole page."""
    parts = [HEAD]
    for name, lines, rest in PARTS:
        cells = [[cell.replace("|", "\\|") for cell in line.cells(results)] for line in lines]
        table = "".join(f"| {' | '.join(each)} |\n" for each in cells)
        head = "| of the paper | command | result | does it agree? |\n|---|---|---|---|\n"
        parts.append(f"## {name}\n\n{head}{table}\n{rest}\n")
    return "\n".join(parts)


def main() -> None:
    """Writes the page, or with --check exits with 1 if it is stale."""
    made = page(ROOT / "results")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == made else "docs/figures.md is stale.")
    PAGE.write_text(made, encoding="utf-8")
    print("wrote docs/figures.md")


if __name__ == "__main__":
    main()
