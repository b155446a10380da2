"""The table: every method as a row, and rows that users write in TOML files."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from coattn.errors import ConfigError, MethodError
from coattn.method.registry import AXES
from coattn.method.row import Method

_HGCA = Method(
    "hgca",
    cache="tiered",
    index="averages",
    select="maw_threshold",
    executor="cpu",
    schedule="same_layer",
    maintenance="entries",
    summary="Lossy. Window on the GPU; of the rest, in DRAM, the CPU attends to what each head attended to.",
    paper="Deng et al., HGCA: Hybrid GPU-CPU Attention for Long Context LLM Inference, 2025",
)
_SCOUT = Method(
    "scout",
    cache="tiered",
    index="digests",
    select="digest_top",
    executor="cpu",
    schedule="layer_ahead",
    maintenance="recall",
    summary="Lossy. KV in DRAM; the GPU attends to the blocks it holds, the CPU, one layer ahead, to others "
    "whose digests promise most.",
    paper="ScoutAttention, 2026",
    params={"window_blocks": 2, "slack": 0.5, "sink_blocks": 1},
)
_HCATTENTION = Method(
    "hcattention",
    cache="values",
    index="codes",
    select="pq_top_p",
    executor="cpu",
    schedule="same_layer",
    summary="Lossy. Key codes in GPU memory give the weights; the CPU adds up the values that weigh most; the "
    "others count with the mean.",
    paper="Yang et al., HCAttention, 2025",
    params={"window_blocks": 4},
)

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "full",
            cache="gpu",
            select="everything",
            summary="Exact. Every token in GPU memory.",
            paper="Vaswani et al., Attention Is All You Need, 2017",
        ),
        Method(
            "offload",
            cache="tiered",
            select="everything",
            executor="pull",
            summary="Exact. KV in DRAM, read by the GPU over PCIe, block by block as it attends.",
            paper="Sheng et al., FlexGen, 2023",
        ),
        Method(
            "cpu",
            cache="tiered",
            select="everything",
            executor="cpu",
            schedule="same_layer",
            summary="Exact. KV in DRAM, attended there by the CPU; only queries and results cross PCIe.",
            paper="He and Zhai, FastDecode, 2024; Jiang et al., NEO, 2024",
        ),
        _HGCA,
        Method(
            "streaming",
            cache="recent",
            select="everything",
            summary="Lossy. Keeps the first tokens and the most recent ones, forgets the rest.",
            paper="Xiao et al., Efficient Streaming Language Models with Attention Sinks (StreamingLLM), 2023",
        ),
        Method(
            "quest",
            cache="gpu",
            index="digests",
            select="digest_top",
            summary="Lossy. Every token in GPU memory; attends to the blocks whose digests promise the most.",
            paper="Tang et al., Quest, 2024",
            params={"block": 16, "dense_layers": 2},
        ),
        Method(
            "snapkv",
            cache="gpu",
            select="prompt_top",
            maintenance="last_queries",
            summary="Lossy. Every token in GPU memory; attends to what a prompt's last queries weighed most, and to "
            "all that came later.",
            paper="Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, 2024",
        ),
        Method(
            "h2o",
            cache="evicting",
            index="sums",
            select="everything",
            maintenance="heavy_hitters",
            summary="Lossy. Each KV head keeps the newest tokens and those that queries weighed most in all; the rest "
            "is gone.",
            paper="Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs, 2023",
        ),
        Method(
            "tova",
            cache="evicting",
            index="last_weights",
            select="everything",
            maintenance="one_set",
            summary="Lossy. Each layer keeps the tokens that its last query weighed most over all heads; the rest is "
            "gone.",
            paper="Oren et al., Transformers are Multi-State RNNs (TOVA), 2024",
        ),
        Method(
            "duo",
            cache="gpu",
            select="retrieval_heads",
            summary="Lossy. Every token in GPU memory; retrieval heads attend to all, the others to the first tokens "
            "and the newest.",
            paper="Xiao et al., DuoAttention, 2024",
        ),
        Method(
            "infinigen",
            cache="tiered",
            index="partial_keys",
            select="alpha_below_max",
            executor="pull",
            schedule="layer_ahead",
            maintenance="first_queries",
            summary="Lossy. KV in DRAM; a part of every key in GPU memory says, one layer ahead, which tokens the GPU "
            "fetches.",
            paper="Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models, 2024",
            params={"window_blocks": 1, "ahead_from": 2, "norm": "before"},
        ),
        Method(
            "pqcache",
            cache="tiered",
            index="prompt_codes",
            select="code_top",
            executor="pull",
            maintenance="prompt_books",
            summary="Lossy. KV in DRAM; codes of a prompt's keys in GPU memory say which tokens the GPU fetches.",
            paper="Zhang et al., PQCache: Product Quantization-based KVCache for Long Context LLM Inference, 2024",
        ),
        _SCOUT,
        _HCATTENTION,
        Method(
            "auto",
            cache="tiered",
            index="sketch",
            select="weight_floor",
            executor="pull",
            maintenance="fit",
            summary="Lossy. To a stated quality: KV in DRAM; a few bits of every key say which tokens matter to a "
            "query; the GPU fetches those, the mean stands in for the rest.",
            params={"window_blocks": 4},
        ),
        replace(
            _HGCA,
            name="hgca-paper",
            summary="Lossy. `hgca` as published: entries in DRAM weigh what queries give on average, not at most.",
            params={"peak": False},
        ),
        replace(
            _SCOUT,
            name="scout-paper",
            summary="Lossy. `scout` as published: digests as bounds, no first block for good, ahead from layer 1.",
            params={"window_blocks": 2, "slack": 1.0, "sink_blocks": 0, "ahead_from": 1},
        ),
        replace(
            _HCATTENTION,
            name="hcattention-paper",
            summary="Lossy. `hcattention` as published: each query head its own entries, the rest counts nothing.",
            params={"window_blocks": 1, "tail": "none", "union": False},
        ),
        Method(
            "oracle",
            cache="gpu",
            select="oracle",
            summary="Lossy, for evaluation. The tokens of largest true weight: the ceiling of a budget.",
        ),
        Method(
            "random",
            cache="gpu",
            select="random",
            summary="Lossy, for evaluation. Tokens drawn at random: the floor of a budget.",
        ),
    )
}

SLIDING = Method(
    "sliding",
    cache="recent",
    select="everything",
    summary="Layers whose own attention is a sliding window: exact, bounded, always in GPU memory.",
    params={"sinks": 0},
)
"""Not in the table: the runtime uses it under every method for layers that look back a fixed number of tokens."""

_KEYS = {*AXES, "summary", "paper", "params"}


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
    known, _, settings = spec.partition(",")
    if known in METHODS:  # as rows of a table are named
        apart = " ".join(f"--set {setting}" for setting in settings.split(","))
        raise MethodError(
            f"{spec!r} is a method with parameters in one.",
            f"Give them apart: --method {known} {apart}; in Python as keywords.",
        )
    raise MethodError(
        f"There is no method {spec!r}.",
        f"Methods: {', '.join(METHODS)}; or a TOML file with a row of your own.",
    )


def read_rows(path: Path) -> dict[str, Method]:
    """The rows of a TOML file: tables `[method.NAME]` with cache, select and, if wanted, the other axes and params."""
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
    unknown, missing = sorted(set(row) - _KEYS), sorted({"cache", "select"} - set(row))
    if unknown or missing:
        problems = [f"unknown key {k!r}" for k in unknown] + [f"missing key {k!r}" for k in missing]
        raise ConfigError(f"{path}: [method.{name}] has {', '.join(problems)}.", f"Keys: {', '.join(sorted(_KEYS))}.")
    given = {key: value for key, value in row.items() if key != "params"}
    if not all(isinstance(text, str) for text in given.values()):
        raise ConfigError(f"{path}: [method.{name}] has a part that is not a name.", 'Write parts as "name".')
    if not isinstance(row.get("params", {}), dict):
        raise ConfigError(f"{path}: method.{name}.params is not a table.", f"Write [method.{name}.params].")
    return Method(name, params=row.get("params", {}), **given)
