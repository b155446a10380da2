"""The table: every method as a row, and rows that users write in TOML files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from coattn.errors import ConfigError, MethodError
from coattn.method import Method

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "full",
            store="pool",
            select="everything",
            place=("gpu",),
            schedule="inline",
            summary="Exact. Every token in GPU memory.",
            paper="Vaswani et al., Attention Is All You Need, 2017",
        ),
        Method(
            "offload",
            store="arena",
            select="everything",
            place=("gpu", "pull"),
            schedule="inline",
            summary="Exact. KV in DRAM, read by the GPU over PCIe, block by block as it attends.",
            paper="Sheng et al., FlexGen, 2023",
        ),
        Method(
            "cpu",
            store="arena",
            select="everything",
            place=("gpu", "cpu"),
            schedule="same_layer",
            summary="Exact. KV in DRAM, attended there by the CPU; only queries and results cross PCIe.",
            paper="He and Zhai, FastDecode, 2024; Jiang et al., NEO, 2024",
        ),
        Method(
            "hgca",
            store="contextual",
            select="average_weight",
            place=("gpu", "cpu"),
            schedule="same_layer",
            summary="Lossy. Window on the GPU; of the rest, in DRAM, the CPU attends to what each head attended to.",
            paper="Deng et al., HGCA: Hybrid GPU-CPU Attention for Long Context LLM Inference, 2025",
        ),
        Method(
            "streaming",
            store="window",
            select="sinks_recent",
            place=("gpu",),
            schedule="inline",
            summary="Lossy. Keeps the first tokens and the most recent ones, forgets the rest.",
            paper="Xiao et al., Efficient Streaming Language Models with Attention Sinks (StreamingLLM), 2023",
        ),
        Method(
            "quest",
            store="digest_pool",
            select="digest_top",
            place=("gpu",),
            schedule="inline",
            summary="Lossy. Every token in GPU memory; attends to the blocks whose digests promise the most.",
            paper="Tang et al., Quest, 2024",
            params={"block": 16, "dense_layers": 2},
        ),
        Method(
            "scout",
            store="residents",
            select="digest_top",
            place=("gpu", "cpu"),
            schedule="layer_ahead",
            summary="Lossy. KV in DRAM; the GPU attends to the blocks it holds, the CPU, one layer ahead, to others "
            "whose digests promise most.",
            paper="ScoutAttention, 2026",
            params={"slack": 0.5, "sink_blocks": 1},
        ),
        Method(
            "hcattention",
            store="coded",
            select="pq_top_p",
            place=("gpu", "cpu_values", "tail_mean"),
            schedule="same_layer",
            summary="Lossy. Key codes in GPU memory give the weights; the CPU adds up the values that weigh most; the "
            "others count with the mean.",
            paper="Yang et al., HCAttention, 2025",
            params={"window_blocks": 4},
        ),
        Method(
            "hgca-paper",
            store="contextual",
            select="average_weight",
            place=("gpu", "cpu"),
            schedule="same_layer",
            summary="Lossy. `hgca` as published: entries in DRAM weigh what queries give on average, not at most.",
            paper="Deng et al., HGCA: Hybrid GPU-CPU Attention for Long Context LLM Inference, 2025",
            params={"peak": False},
        ),
        Method(
            "scout-paper",
            store="residents",
            select="digest_top",
            place=("gpu", "cpu"),
            schedule="layer_ahead",
            summary="Lossy. `scout` as published: digests as bounds, no first block for good, ahead from layer 1.",
            paper="ScoutAttention, 2026",
            params={"slack": 1.0, "sink_blocks": 0, "ahead_from": 1},
        ),
        Method(
            "hcattention-paper",
            store="coded",
            select="pq_top_p",
            place=("gpu", "cpu_values"),
            schedule="same_layer",
            summary="Lossy. `hcattention` as published: each query head its own entries, the rest counts nothing.",
            paper="Yang et al., HCAttention, 2025",
            params={"window_blocks": 1, "tail": "renormalise", "union": False},
        ),
        Method(
            "oracle",
            store="pool",
            select="oracle",
            place=("gpu",),
            schedule="inline",
            summary="Lossy, for evaluation. The tokens of largest true weight: the ceiling of a budget.",
        ),
        Method(
            "random",
            store="pool",
            select="random",
            place=("gpu",),
            schedule="inline",
            summary="Lossy, for evaluation. Tokens drawn at random: the floor of a budget.",
        ),
    )
}

SLIDING = Method(
    "sliding",
    store="window",
    select="sinks_recent",
    place=("gpu",),
    schedule="inline",
    summary="Layers whose own attention is a sliding window: exact, bounded, always in GPU memory.",
    params={"sinks": 0},
)
"""Not in the table: the runtime uses it under every method for layers that look back a fixed number of tokens."""

_KEYS = {"store", "select", "place", "schedule", "summary", "paper", "params"}


def find_method(spec: str | Method) -> Method:
    """A row by name, from a file (`rows.toml` with one row, or `rows.toml:name`), or the row itself."""
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise MethodError(f"A method is a name or a row, not {spec!r}.", f"Known methods: {', '.join(METHODS)}.")
    path, _, name = spec.partition(".toml:") if ".toml:" in spec else (spec, "", "")
    if spec.endswith(".toml") or name:
        rows = read_rows(Path(spec if not name else path + ".toml"))
        if not name and len(rows) == 1:
            return next(iter(rows.values()))
        if name in rows:
            return rows[name]
        where = f"{path}.toml" if name else spec
        raise MethodError(
            f"{where} has {'no row ' + repr(name) if name else 'several rows'}; its rows are: {', '.join(rows)}.",
            f"Name one: {where}:{next(iter(rows))}.",
        )
    if spec in METHODS:
        return METHODS[spec]
    raise MethodError(
        f"There is no method {spec!r}.",
        f"Methods: {', '.join(METHODS)}; or a TOML file with a row of your own.",
    )


def read_rows(path: Path) -> dict[str, Method]:
    """The rows of a TOML file: tables `[method.NAME]` with store, select, place, schedule and, if wanted, params."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MethodError(f"There is no file {path}.", "Check the path of the method file.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MethodError(
            f"{path} cannot be read as TOML: {error}.", "See docs/add_a_method.md for an example."
        ) from None
    rows = data.get("method")
    if set(data) - {"method"} or not isinstance(rows, dict) or not rows:
        raise ConfigError(f"{path} must hold tables [method.NAME] and nothing else.", "See docs/add_a_method.md.")
    return {name: _row(path, name, row) for name, row in rows.items()}


def _row(path: Path, name: str, row: Any) -> Method:
    if not isinstance(row, dict):
        raise ConfigError(f"{path}: method.{name} is not a table.", f"Write [method.{name}] on a line of its own.")
    unknown, missing = sorted(set(row) - _KEYS), sorted({"store", "select", "place", "schedule"} - set(row))
    if unknown or missing:
        problems = [f"unknown key {k!r}" for k in unknown] + [f"missing key {k!r}" for k in missing]
        raise ConfigError(f"{path}: [method.{name}] has {', '.join(problems)}.", f"Keys: {', '.join(sorted(_KEYS))}.")
    place = row["place"] if isinstance(row["place"], list) else [row["place"]]
    texts = [row["store"], row["select"], row["schedule"], row.get("summary", ""), row.get("paper", ""), *place]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{path}: [method.{name}] has a part that is not a name.", 'Write parts as "name".')
    if not isinstance(row.get("params", {}), dict):
        raise ConfigError(f"{path}: method.{name}.params is not a table.", f"Write [method.{name}.params].")
    return Method(
        name,
        row["store"],
        row["select"],
        tuple(place),
        row["schedule"],
        row.get("summary", ""),
        row.get("paper", ""),
        row.get("params", {}),
    )
