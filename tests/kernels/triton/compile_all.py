"""Compiles kernels for GPUs that are not there. Run as a program: the interpreter must be off."""

import json
import sys
from typing import Any

import triton
from tests.kernels.cards import SHARED, usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coattn.kernels.pool_memory import COLD, FRESH, LONG_AGO, NEVER, NONE
from coattn.kernels.quantise.sketch import AXES
from coattn.kernels.rest import width
from coattn.kernels.triton import (
    append,
    attend,
    attend_prompt,
    attend_scored,
    average,
    delta_rule,
    digest,
    experts,
    fetch_tokens,
    fill_pool,
    flush,
    handover,
    linear,
    merge,
    merge_rows,
    model,
    nearest,
    note_case,
    packed_experts,
    packed_linear,
    pick_blocks,
    read_keys,
    recall,
    renew,
    rest,
    sketch,
    token_pool,
    tokens,
)
from coattn_lab.bench import drive_kernel, read_kernel

KINDS = {
    "*i32": "table tokens ids places flush seq order post step reply failed verdict to source place count host_tokens "
    "window window_tokens slots held chosen host_table present",
    "*i64": "stamp moved",
    "*fp32": "out lse scores values sums wanted worth",
}
POINTERS = {name: kind for kind, names in KINDS.items() for name in names.split()}
FLOATS = {"length_eps", "next_eps", "scale", "softcap", "eps", "keep", "gain", "slack", "noise", "wrong", "nothing"}
FLOATS |= {"least", "furthest", "highest"}

PACKED = [
    dict(zip(("FORM", "GROUP", "SPAN", "ROWS", "ZEROS", "KIND", "OFFSET"), row, strict=True))
    for row in (
        (4, 128, 128, 1, 1, 0, 0),
        (8, 128, 128, 1, 0, 0, 0),
        (1, 128, 128, 128, 0, 0, 0),
        (4, 32, 32, 1, 3, 2, 0),
        (5, 32, 32, 1, 3, 2, 0),
        (5, 32, 32, 1, 0, 0, 16),
        (6, 16, 32, 1, 0, 2, 32),
        (16, 32, 32, 1, 0, 2, 0),
        (16, 32, 32, 1, 0, 1, 0),
    )
]
"""How matrices are packed: AWQ; int8; FP8 in blocks; GGUF's Q4_K, Q5_K, Q5_0, Q6_K and IQ4_XS; MXFP4."""
ENTRIES = {"codes_ptr": "*u8", "scales_ptr": "*fp16"} | dict.fromkeys(
    ("mean_ptr", "tail_ptr", "middle_ptr", "spread_ptr"), "*fp32"
)
FREE = "free_ptr incoming_ptr num_incoming_ptr ids_ptr later_ptr num_attended_ptr age_ptr since_ptr"
ENTRIES |= dict.fromkeys(FREE.split(), "*i32")
ENTRIES |= {"place_ptr": "*i16"}

PRODUCTS = [
    (n, k) for n in (2560, 5120, 6144, 14336, 28672, 151936) for k in (1024, 2560, 4096, 5120, 12288, 14336, 17408)
]
"""Sizes of linear layers that models of 0.6 to 32 billion weights have, one of each tile at least."""

NUMBERED = tuple(f"{name}_{i}" for name in ("out", "lse") for i in range(8))
COPIED = {"BLOCK": 32, "R_PAD": 32, "D": 128, "D_PAD": 128, "SIZE": 2048}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    *(
        (
            attend._attend,
            {"GROUP": group, "GROUP_PAD": 16, "BLOCK": 32, "ROWS": attend.ROWS, "D": d, "D_PAD": d, "VALUES": 32 * d}
            | {"CAP": d == 128, "STAMP": d == 128, "SCORES": d == 128, "PRECISION": "tf32", "FOLLOW": True},
        )
        for d, group in ((64, 7), (128, 4), (256, 8))
    ),
    (
        average._average,
        {"SPLITS": 5, "SPLITS_PAD": 8, "GROUP": 4, "GROUP_PAD": 4, "BLOCK": 32, "TILE": 128, "SUMMED": True},
    ),
    *(
        (
            append._append,
            {"FLUSH": True, "PACKED": packed, "NEAR": packed, "BLOCK": 32, "D": 80, "D_PAD": 128, "FOLLOW": True},
        )
        for packed in (False, True)
    ),
    *(
        (kernel, {**constants, "PACKED": packed, "BLOCK": 32, "D": d, "D_PAD": d})
        for packed, d in ((False, 128), (True, 128), (False, 256), (True, 256))
        for kernel, constants in (
            (token_pool._bring, {"LINES": 128, "ROWS": 16, "FRESH": 1024, "IN_8_BITS": not packed}),
            (
                attend_scored._fetch,
                {"GROUP": 5, "GROUP_PAD": 16, "LOOK": 256, "ROWS": 16, "SPLITS_PAD": 8, "FRESH": 1024}
                | {"CAP": True, "PRECISION": "tf32", "IN_8_BITS": not packed},
            ),
        )
    ),
    (append._write_rows, {"ROWS": 16, "D": 80, "D_PAD": 128}),
    *(
        (kernel, {"BITS": bits, "BLOCK": 32, "HALF": half, "HALF_PAD": half, "POWER": half, "NORM": 0.125, **constants})
        for bits, half, group in ((8, 64, 4), (4, 64, 4), (4, 32, 7), (8, 128, 16))
        for kernel, constants in (
            (tokens._write_tokens, {"ROWS": 16, "PRECISION": "ieee", "FOLLOW": half == 64}),
            (
                tokens._attend_tokens,
                {"GROUP": group, "GROUP_PAD": 16, "ROWS": attend.ROWS, "CAP": half == 64, "STAMP": half == 64}
                | {"PRECISION": "tf32", "EXACT": False, "FOLLOW": True},
            ),
            (tokens._listed_tokens, {"ROWS": tokens.MOST_ROWS, "EXACT": False}),
        )
    ),
    (
        merge._merge,
        {"A": 5, "A_PAD": 8, "B": 1, "B_PAD": 1, "D": 128, "D_PAD": 128, "TAIL": True} | {"SINK": True, "FOLLOW": True},
    ),
    *(
        (
            attend_prompt._attend_prompt,
            {"GROUP": 4, "BM": rows, "BN": columns, "D": d, "D_PAD": d, "CAP": True, "CAUSAL": True}
            | {"PRECISION": "tf32", "WINDOW": window, "SINKS": window},
        )
        for d, rows, columns, window in ((64, 128, 64, False), (128, 128, 64, True), (256, 64, 32, False))
    ),
    (merge_rows._merge_rows, {"COUNT": 4, "HEADS": 4, "D": 80, "D_PAD": 128}),
    (handover._copy, {"SIZE": 8192}),
    (handover._post, {"COPY": True, "SIZE": 8192}),
    (handover._wait, {}),
    (handover._mark, {}),
    (handover._receive, {"D": 80, "D_PAD": 128}),
    *(
        (linear._vector, {"BIAS": True, "RESIDUAL": True, "BN": bn, "BK": bk, "FOLLOW": True})
        for bn, bk in sorted({linear.tile_of(1, *shape)[:2] for shape in PRODUCTS})
    ),
    *(
        (linear._few, {"BIAS": False, "RESIDUAL": True, "M": linear.MOST_TOKENS, "BN": bn, "BK": bk, "FOLLOW": False})
        for bn, bk in sorted({linear.tile_of(16, *shape)[:2] for shape in PRODUCTS})
    ),
    *(
        (
            packed_linear._packed,
            {**stored, "F16": f16, "BIAS": False, "RESIDUAL": True, "M": m, "BN": bn, "FOLLOW": m == 16},
        )
        for stored in PACKED
        for m, bn, f16 in ((16, 64, False), (32, 64, False), (32, 32, True))
    ),
    *((packed_linear._unpack, {**stored, "BN": 32}) for stored in PACKED),
    *(
        (
            packed_experts._packed_experts,
            {**stored, "F16": False, "BIAS": True, "TOP": 8, "R_PAD": r, "M": 16, "BN": 32, "FOLLOW": True},
        )
        for stored in PACKED
        for r in (8, 512)
    ),
    (
        experts._route,
        {"TOP": 8, "TOP_PAD": 8, "E_PAD": 128, "KIND": 1, "BIAS": True, "NORM": True, "FOLLOW": True},
    ),
    (experts._gates_one, {"BN": 8, "BK": 256, "FOLLOW": True}),
    *(
        (
            experts._down_one,
            {"RESIDUAL": top == 8, "TOP": top, "TOP_PAD": top, "BN": 4, "BK": 2048 // top, "FOLLOW": True},
        )
        for top in (2, 8)
    ),
    *(
        (kernel, {"R_PAD": 512, "M": experts.TOGETHER, "BK": 128, "FOLLOW": True, **more})
        for kernel, more in ((experts._gates_few, {"TOP": 8, "BN": 32}), (experts._down_few, {"BN": 64}))
    ),
    (experts._add_up, {"RESIDUAL": True, "TOP": 8, "TOP_PAD": 8, "BN": 512, "FOLLOW": True}),
    *(
        (
            delta_rule._delta_rule,
            {"K": 128, "V": 128, "K_PAD": 128, "V_PAD": 128, "TAPS": 4, "TAPS_PAD": 4, "BIAS": bias, "FOLLOW": True},
        )
        for bias in (False, True)
    ),
    *((model._rms_norm, {"KIND": kind, "WIDTH": 4096, "FOLLOW": True}) for kind in range(3)),
    *((model._add_norm, {"KIND": a, "NEXT": b, "WIDTH": 4096, "FOLLOW": True}) for a, b in ((0, 0), (2, 2), (-1, -1))),
    *((model._gated, {"ACT": act, "SIZE": 1024, "FOLLOW": True}) for act in range(3)),
    (model._rotary, {"HALF": 64, "FOLLOW": True}),
    *(
        (
            model._prepare_heads,
            {"KIND": kind, "HEADS": heads, "D": d, "D_PAD": d, "TURNED": turned, "PAIRS": pairs, "FOLLOW": heads == 1},
        )
        for kind, heads, d, turned, pairs in (
            *((0, 1, 128, 128, False), (0, 8, 128, 128, False)),
            *((-1, 2, 128, 64, True), (2, 1, 256, 64, False)),
        )
    ),
    (fetch_tokens._fetch_tokens, {"TOKENS": fetch_tokens.TOKENS, "D": 80, "D_PAD": 128}),
    (recall._recall, {"PACKED": False, **COPIED}),
    (recall._recall, {"PACKED": True, **COPIED}),
    (
        digest._score_digest,
        {"GROUP": 4, "GROUP_PAD": 16, "ROWS": 64, "D": 128, "D_PAD": 128, "HALVES": True, "CAP": True},
    ),
    (
        pick_blocks._pick_blocks,
        {"GROUP": 5, "BLOCK": 32, "N_PAD": 2048, "CHUNKS_PAD": 32, "K_PAD": 64, "P_PAD": 64, "R_PAD": 2},
    ),
    (drive_kernel._drive, {"GROUP": 5, "CHUNKS_PAD": 32, "TILE": 256}),
    (renew._renew, {"RECALL": True, "BLOCK": 32, "D": 128, "D_PAD": 128, "K_PAD": 64, "P_PAD": 64}),
    (renew._bring, {"PACKED": False, **COPIED}),
    (renew._bring, {"PACKED": True, **COPIED}),
    (read_keys._read_keys, {"SIZE": 4096, "STEP": 2048}),
    (read_keys._listed_rows, {"BLOCK": 32, "ROWS": 32, "D": 128, "D_PAD": 128}),
    (nearest._nearest, {"WIDTH": 4, "ROWS": 32, "TILE": 128}),
    (nearest._nearest_in_cells, {"WIDTH": 2, "ALONG": 256, "HALVINGS": 8, "CELLS": 65536, "ROWS": 32, "TILE": 16}),
    (nearest._nearest_flushed, {"WIDTH": 2, "D": 128, "ROWS": 32, "TILE": 128}),
    (nearest._store_codes, {"BITS": 13, "ROWS": 32, "WIDTH_PAD": 64}),
    (nearest._store_codes, {"BITS": 16, "ROWS": 32, "WIDTH_PAD": 64}),
    (flush._flush_rows, {"KIND": 1, "LEVELS": 0, "PARTS": 1, "ROWS": 32, "D": 128, "D_PAD": 128}),
    (flush._flush_rows, {"KIND": 1, "LEVELS": 15, "PARTS": 2, "ROWS": 32, "D": 128, "D_PAD": 64}),
    (nearest._turn_flushed, {"D": 128, "D_PAD": 128, "ROWS": 32, "AXES": 4}),
    (flush._mean_values, {"GROUP": 4, "D": 128, "D_PAD": 128}),
    (flush._sum_values, {"ROWS": 32, "D": 128, "D_PAD": 128}),
    (flush._flush_rows, {"KIND": 0, "LEVELS": 0, "PARTS": 1, "ROWS": 32, "D": 80, "D_PAD": 128}),
    (read_kernel._read, {"SIZE": 4096, "GATHER": True}),
    *(
        (kernel, {"WIDTH": width(d), "AXES": AXES, "D": d, "D_PAD": d, "PRECISION": "tf32", **constants})
        for d in (64, 128, 256)
        for kernel, constants in (
            (rest._sum, {"ROWS": rest.ROWS}),
            (rest._flush, {"ROWS": rest.ROWS, "BLOCK": 32}),
            (rest._lean, {"GROUP": 5, "GROUP_PAD": 16, "CAP": d == 128}),
        )
    ),
    (attend_scored._choose, {"GROUP": 5, "GROUP_PAD": 16, "LOOK": attend_scored.LOOK, "FRESH": FRESH, "COLD": COLD}),
    (attend_scored._list, {"FRESH": FRESH, "SOME": attend_scored.SOME, "SPLITS_PAD": 8, "LOOK": 256}),
    *((token_pool._renew, {"PLACES_PAD": places, "FRESH": FRESH}) for places in (1024, 16384)),
    (note_case._note, {"GROUP": 5, "D": 128, "D_PAD": 128}),
    *(
        (kernel, {"GROUP": 5, "GROUP_PAD": 16, "PRECISION": "tf32", **constants})
        for kernel, constants in (
            (sketch._worth, {"PLANES": 256, "PIECE": 64, "D": 128, "D_PAD": 128}),
            (sketch._score, {"BLOCK": 32, "ROWS": sketch.ROWS, "WORDS": 8, "WORDS_PAD": 8, "COLD": COLD, "CAP": True}),
        )
    ),
    *(
        (sketch._flush, {"BLOCK": 32, "BLOCK_PAD": 32, "WORDS": d // 16, "D": d, "D_PAD": d, "PRECISION": "tf32"})
        for d in (128, 256)
    ),
    *(
        (sketch._lost, {"BLOCK": 32, "ROWS": sketch.ROWS, "WORDS": d // 16, "D": d, "D_PAD": d, "PRECISION": "tf32"})
        for d in (64, 128, 256)
    ),
    *(
        (
            fill_pool._weigh,
            {"GROUP": 4, "KEYS": fill_pool.keys_of(d), "ROWS": fill_pool.QUERIES, "D": d, "D_PAD": d, "FIRST": first}
            | {"PRECISION": "tf32"},
        )
        for d in (64, 256)
        for first in (True, False)
    ),
    (fill_pool._whole, {"TILES_PAD": fill_pool.TILES}),
    (fill_pool._learn, {"ROWS": fill_pool.LEARNT, "D": 128, "CHANNELS": fill_pool.CHANNELS}),
    *(
        (kernel, {"IN_8_BITS": packed, **constants})
        for packed in (False, True)
        for kernel, constants in (
            (
                fill_pool._books,
                {"GROUP": 5, "GROUP_PAD": 8, "FRESH": FRESH, "SIZE": fill_pool.BOOK, "NONE": NONE, "NEVER": NEVER}
                | {"LONG_AGO": LONG_AGO},
            ),
            (fill_pool._put, {"COLD": COLD, "ROWS": fill_pool.ROWS, "BLOCK": 32, "D": 256, "D_PAD": 256}),
        )
    ),
]

TYPES: dict[Any, dict[str, str]] = {
    attend_scored._choose: {"place_ptr": "*i16", "tail_ptr": "*fp32", "bound_ptr": "*fp32"},
    token_pool._renew: {"place_ptr": "*i16"},
    note_case._note: dict.fromkeys(("to_ptr", "near_ptr", "far_ptr"), "*fp32")
    | dict.fromkeys(("layers_ptr", "heads_ptr", "slots_ptr"), "*i32"),
    attend_scored._list: {},
    sketch._worth: {"worth_ptr": "*bf16", "base_ptr": "*fp32", "rest_ptr": "*fp32", "out_ptr": "*fp16"},
    sketch._score: {"worth_ptr": "*fp16", "rest_ptr": "*fp32", "place_ptr": "*i16", "inside_ptr": "*fp32"},
    sketch._flush: dict.fromkeys(("start_ptr", "half_ptr"), "*fp32") | {"of_ptr": "*bf16"},
    sketch._lost: {"keys_ptr": "*bf16", "worth_ptr": "*bf16", "base_ptr": "*fp32"},
    **{kernel: {"start_ptr": "*fp32", "axes_ptr": "*i32"} for kernel in (rest._sum, rest._flush)},
    rest._lean: {"worth_ptr": "*bf16", "bound_ptr": "*fp32", "wait_ptr": "*fp32", "axes_ptr": "*i32"},
    fill_pool._learn: {},
    fill_pool._whole: {"whole_ptr": "*fp32"},
    fill_pool._weigh: {},
    fill_pool._books: dict.fromkeys(("place_ptr", "listed_ptr"), "*i16")
    | {"margin_ptr": "*fp16", "chosen_ptr": "*i64"}
    | dict.fromkeys(("evict_ptr", "since_ptr"), "*i32")
    | dict.fromkeys(("bound_ptr", "est_ptr"), "*fp32"),
    fill_pool._put: {"chosen_ptr": "*i64"},
}
"""What is not told by an argument's name alone; every other pointer of these kernels is to int32 or by `KINDS`."""
ODD: dict[Any, dict[str, str]] = {
    **{
        kernel: {"codes_ptr": "*u8", "high_ptr": "*u8", "super_ptr": "*fp16", "out_ptr": "*bf16"}
        for kernel in (packed_linear._packed, packed_linear._unpack, packed_experts._packed_experts)
    },
    pick_blocks._pick_blocks: {"host_ptr": "*i32"},
    read_keys._read_keys: {"ids_ptr": "*i32", "out_ptr": "*bf16"},
    read_keys._listed_rows: {"ids_ptr": "*i64", "out_ptr": "*bf16"},
    tokens._listed_tokens: {"codes_ptr": "*u8", "halves_ptr": "*fp16", "ids_ptr": "*i64", "out_ptr": "*bf16"},
    **{kernel: {"codes_ptr": "*u8", "halves_ptr": "*fp16"} for kernel in (tokens._write_tokens, tokens._attend_tokens)},
    append._write_rows: {"ids_ptr": "*i64", "places_ptr": "*i64"},
    read_kernel._read: dict.fromkeys(("x_ptr", "order_ptr", "out_ptr"), "*i32"),
    nearest._nearest_in_cells: {"edges_ptr": "*fp32", "start_ptr": "*i32", "which_ptr": "*i16"},
    nearest._turn_flushed: {"to_ptr": "*bf16"},
    attend_prompt._attend_prompt: {"out_ptr": "*bf16"},
    experts._route: {"index_ptr": "*i64", "worth_ptr": "*bf16", "bias_ptr": "*fp32"},
    experts._add_up: {"out_ptr": "*bf16", "part_ptr": "*fp32"},
    **{
        kernel: {"out_ptr": "*bf16", "index_ptr": "*i64", "worth_ptr": "*bf16", "part_ptr": "*fp32"}
        for kernel in (experts._gates_one, experts._down_one, experts._gates_few, experts._down_few)
    },
    delta_rule._delta_rule: {"state_ptr": "*fp32", "read_ptr": "*i32", "write_ptr": "*i32", "out_ptr": "*bf16"},
    **{
        kernel: {"out_ptr": "*bf16"}
        for kernel in (model._rms_norm, model._gated, model._add_norm, linear._vector, linear._few)
    },
}
"""Of kernels whose other arguments are told by their names: those that are not."""
WHOLE = "block to seq kept bit ids later count free incoming clock age token token_of num_incoming num_attended"

TILES: dict[Any, Any] = {
    attend._attend: lambda c, shared: attend.tile_of(8, 2 * c["D_PAD"], shared)._asdict(),
    tokens._attend_tokens: lambda *_: {"warps": tokens.WARPS, "stages": tokens.stages_of(8)},
    attend_prompt._attend_prompt: lambda c, _: (
        {"warps": 8, "stages": 3} if c["D_PAD"] <= 128 else {"warps": 4, "stages": 2}
    ),
    linear._vector: lambda c, _: vector(c["BN"], c["BK"]),
    token_pool._renew: lambda c, _: {"warps": 32 if c["PLACES_PAD"] > 8192 else 4, "stages": 3},
    **dict.fromkeys((sketch._lost, fill_pool._weigh), lambda c, _: {"warps": 8 if c["D"] > 64 else 4, "stages": 3}),
    **dict.fromkeys((experts._gates_few, experts._down_few), lambda *_: {"warps": 4, "stages": 4}),
    experts._gates_one: lambda *_: {"warps": 4, "stages": 2},
    experts._down_one: lambda *_: {"warps": 4, "stages": 1},
    rest._sum: lambda c, _: {"warps": 8 if c["D"] > 128 else 4},
    experts._route: lambda *_: {"warps": 1},
    packed_experts._packed_experts: lambda *_: dict(
        zip(("warps", "stages"), packed_linear.tile_of(64)[1:], strict=True)
    ),
    delta_rule._delta_rule: lambda *_: {"warps": 8},
    packed_linear._packed: lambda c, _: dict(
        zip(("warps", "stages"), packed_linear.tile_of(8192 if c["BN"] == 64 else 64)[1:], strict=True)
    ),
    linear._few: lambda c, shared: few(c["BN"], c["BK"], shared),
}


def few(bn: int, bk: int, shared: int) -> dict[str, int]:
    """The tile of so many rows and columns, as it is launched."""
    tile = next(t for shape in PRODUCTS if (t := linear.tile_of(16, *shape))[:2] == (bn, bk))
    return dict(zip(("warps", "stages"), linear.fitted(tile, shared)[2:], strict=True))


def vector(bn: int, bk: int) -> dict[str, int]:
    """The same of one token."""
    tile = next(t for shape in PRODUCTS if (t := linear.tile_of(1, *shape))[:2] == (bn, bk))
    return dict(zip(("warps", "stages"), tile[2:], strict=True))


def kind(kernel: Any, name: str, constants: dict[str, Any]) -> str:
    """The type of an argument, from its name."""
    if constants.get("F16") and name in ("x_ptr", "b_ptr", "r_ptr", "out_ptr"):
        return "*fp16"
    if kernel in (packed_linear._packed, packed_linear._unpack, packed_experts._packed_experts):
        if name == "index_ptr":
            return "*i64"
        stored = {"scale_ptr": ("*fp16", "*u8", "*i8")[constants["KIND"]], "zero_ptr": "*i8"}
        stored["table_ptr"] = "*fp32" if kernel is packed_linear._unpack else "*fp16" if constants["F16"] else "*bf16"
        if name in stored:
            return stored[name]
    if found := TYPES.get(kernel, {}).get(name) or ODD.get(kernel, {}).get(name):
        return found
    if kernel in TYPES and name.endswith("_ptr") and name[:-4] in WHOLE.split():
        return "*i32"
    if name in FLOATS:
        return "fp32"
    if name in ("out_here", "lse_here"):
        return "*fp32"
    if name.endswith("_out") and name not in ("q_out", "k_out"):
        return "*fp32" if name in ("wanted_out", "worth_out", "values_out") else "*i32"
    others = (*NUMBERED, "q_out", "k_out", "out_a", "lse_a", "out_b", "lse_b", "out_t", "lse_t")
    if not name.endswith("_ptr") and name not in others:
        return "i32"
    if kernel in (token_pool._bring, attend_scored._fetch, fill_pool._put) and name in ENTRIES:
        return ENTRIES[name]
    if constants.get("PACKED") and name in ("memory_ptr", "scale_ptr", "near_ptr"):
        return "*u8" if name == "memory_ptr" else "*fp16"
    if kernel is merge_rows._merge_rows and name[:4] in ("out_", "lse_", "tota", "stri"):
        numbers = {"out_": "*bf16", "lse_": "*fp32", "tota": "*fp32", "stri": "*i64"}
        return "i32" if name == "total_token" else numbers[name[:4]]
    if kernel is merge._merge:
        return "*bf16" if name == "result_ptr" else "*fp32"
    if name == "codes_ptr":
        return "*i16"
    if kernel is nearest._store_codes and name == "kept_ptr":
        return "*u8" if constants["BITS"] != 16 else "*i16"
    if kernel is flush._flush_rows and constants["LEVELS"] and name in ("host_ptr", "scale_ptr"):
        return "*u8" if name == "host_ptr" else "*fp16"
    if constants.get("PACKED") and name in ("host_ptr", "halves_ptr"):
        return "*u8" if name == "host_ptr" else "*fp16"
    return POINTERS.get(name.removesuffix("_ptr"), "*bf16")


def compiled(kernel: Any, constants: dict[str, Any], card: int) -> Any:
    """As launched on a card; pointers and strides are multiples of 16: only then copies go through shared memory."""
    if "FOLLOW" in constants:
        constants = {**constants, "FOLLOW": constants["FOLLOW"] and card >= 90}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else kind(kernel, n, constants) for n in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    even = {(i,): [["tt.divisibility", 16]] for i, form in enumerate(signature.values()) if form[0] in "*i"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=even)
    tile = TILES[kernel](constants, SHARED[card]) if kernel in TILES else {}
    options = {f"num_{name}": value for name, value in tile.items()}
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def main() -> None:
    """Reads lines `NUMBER CARD`, answers each with a line of JSON: what the kernel takes, or why it cannot be made."""
    for line in sys.stdin:
        number, card = map(int, line.split())
        kernel, constants = KERNELS[number]
        try:
            made = compiled(kernel, constants, card)
            [took] = usage(made.asm["cubin"])
            answer = {"shared": made.metadata.shared, "threads": 32 * made.metadata.num_warps}
            answer |= {"registers": took.registers}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
