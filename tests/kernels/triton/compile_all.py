"""Compiles every kernel for a Hopper GPU, which needs no GPU. Run as a program: the interpreter must be off."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coattn.kernels.triton import (
    append,
    attend,
    attend_prompt,
    attend_scored,
    average,
    digest,
    flush,
    handover,
    linear,
    merge,
    merge_rows,
    model,
    nearest,
    pick_blocks,
    read_keys,
    recall,
    renew,
    token_pool,
)
from coattn_lab.bench import drive_kernel, read_kernel

KINDS = {
    "*i32": "table tokens ids places flush seq order post step reply failed verdict to source place count host_tokens "
    "window window_tokens slots held chosen host_table present",
    "*i64": "stamp moved",
    "*fp32": "out lse scores values sums wanted worth",
}
POINTERS = {name: kind for kind, names in KINDS.items() for name in names.split()}
FLOATS = {"scale", "softcap", "eps", "keep", "gain", "slack", "noise", "wrong", "nothing"}

ENTRIES = {"codes_ptr": "*u8", "scales_ptr": "*fp16"} | dict.fromkeys(
    ("mean_ptr", "tail_ptr", "middle_ptr", "spread_ptr"), "*fp32"
)
FREE = "free_ptr incoming_ptr num_incoming_ptr ids_ptr later_ptr num_attended_ptr age_ptr since_ptr"
ENTRIES |= dict.fromkeys(FREE.split(), "*i32")
ENTRIES |= {"place_ptr": "*i16"}

NUMBERED = tuple(f"{name}_{i}" for name in ("out", "lse") for i in range(8))
COPIED = {"BLOCK": 32, "R_PAD": 32, "D": 128, "D_PAD": 128, "SIZE": 2048}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (
        attend._attend,
        {"GROUP": 4, "GROUP_PAD": 16, "BLOCK": 32, "ROWS": 64, "D": 128, "D_PAD": 128, "CAP": True, "STAMP": True}
        | {"PRECISION": "tf32", "SCORES": True, "FOLLOW": True, "VALUES": 32 * 128},
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
        (
            kernel,
            {**constants, "PACKED": packed, "BLOCK": 32, "D": 128, "D_PAD": 128},
        )
        for packed in (False, True)
        for kernel, constants in (
            (
                token_pool._bring,
                {"LINES": 128, "ROWS": 16, "FRESH": 1024, "IN_8_BITS": not packed},
            ),
            (
                attend_scored._fetch,
                {"GROUP": 5, "GROUP_PAD": 16, "LOOK": 256, "ROWS": 16, "SPLITS_PAD": 8, "FRESH": 1024}
                | {"CAP": True, "PRECISION": "tf32", "IN_8_BITS": not packed},
            ),
        )
    ),
    (append._write_rows, {"ROWS": 16, "D": 80, "D_PAD": 128}),
    (
        merge._merge,
        {"A": 5, "A_PAD": 8, "B": 1, "B_PAD": 1, "D": 128, "D_PAD": 128, "TAIL": True} | {"FOLLOW": True},
    ),
    *(
        (
            attend_prompt._attend_prompt,
            {"GROUP": 4, "BM": 64, "BN": 32, "D": 64, "D_PAD": 64, "CAP": True, "CAUSAL": True, "PRECISION": "tf32"}
            | {"WINDOW": window, "SINKS": window},
        )
        for window in (False, True)
    ),
    (merge_rows._merge_rows, {"COUNT": 4, "HEADS": 4, "D": 80, "D_PAD": 128}),
    (handover._copy, {"SIZE": 8192}),
    (handover._post, {"COPY": True, "SIZE": 8192}),
    (handover._wait, {}),
    (handover._receive, {"D": 80, "D_PAD": 128}),
    (linear._vector, {"BIAS": True, "RESIDUAL": True, "BN": 2, "BK": 4096, "FOLLOW": True}),
    (linear._few, {"BIAS": True, "RESIDUAL": True, "M": 16, "BN": 32, "BK": 128, "FOLLOW": False}),
    (model._rms_norm, {"WIDTH": 4096, "FOLLOW": True}),
    (model._gated, {"SIZE": 1024, "FOLLOW": True}),
    (model._rotary, {"HALF": 64, "FOLLOW": True}),
    (model._prepare_heads, {"NORM": True, "HEADS": 1, "D": 128, "FOLLOW": True}),
    (model._prepare_heads, {"NORM": True, "HEADS": 8, "D": 128, "FOLLOW": False}),
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
    (
        renew._renew,
        {"RECALL": True, "BLOCK": 32, "D": 128, "D_PAD": 128, "K_PAD": 64, "P_PAD": 64},
    ),
    (renew._bring, {"PACKED": False, **COPIED}),
    (renew._bring, {"PACKED": True, **COPIED}),
    (read_keys._read_keys, {"SIZE": 4096, "STEP": 2048}),
    (read_keys._listed_rows, {"BLOCK": 32, "ROWS": 32, "D": 128, "D_PAD": 128}),
    (nearest._nearest, {"WIDTH": 4, "ROWS": 32, "TILE": 128}),
    (
        nearest._nearest_in_cells,
        {"WIDTH": 2, "ALONG": 256, "HALVINGS": 8, "CELLS": 65536, "ROWS": 32, "TILE": 16},
    ),
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
]


def kind(kernel: Any, name: str, constants: dict[str, Any]) -> str:
    """The type of an argument, from its name."""
    if name in FLOATS:
        return "fp32"
    if name in ("out_here", "lse_here"):
        return "*fp32"
    if name.endswith("_out") and name not in ("q_out", "k_out"):
        return "*fp32" if name in ("wanted_out", "worth_out", "values_out") else "*i32"
    others = (*NUMBERED, "q_out", "k_out", "out_a", "lse_a", "out_b", "lse_b", "out_t", "lse_t")
    if not name.endswith("_ptr") and name not in others:
        return "i32"
    if kernel in (token_pool._bring, attend_scored._fetch) and name in ENTRIES:
        return ENTRIES[name]
    if constants.get("PACKED") and name in ("memory_ptr", "scale_ptr", "near_ptr"):
        return "*u8" if name == "memory_ptr" else "*fp16"
    if name == "host_ptr" and kernel is pick_blocks._pick_blocks:
        return "*i32"
    if kernel is read_keys._read_keys and name == "ids_ptr":
        return "*i32"
    if kernel is read_keys._listed_rows and name == "ids_ptr":
        return "*i64"
    if kernel is append._write_rows and name in ("ids_ptr", "places_ptr"):
        return "*i64"
    if kernel in (read_keys._read_keys, read_keys._listed_rows) and name == "out_ptr":
        return "*bf16"
    if kernel is read_kernel._read:
        return "*i32"
    if kernel is nearest._nearest_in_cells and name in ("edges_ptr", "start_ptr", "which_ptr"):
        return {"edges_ptr": "*fp32", "start_ptr": "*i32", "which_ptr": "*i16"}[name]
    if kernel is nearest._turn_flushed and name == "to_ptr":
        return "*bf16"
    if kernel in (model._rms_norm, model._gated, linear._vector, linear._few) and name == "out_ptr":
        return "*bf16"
    if kernel is merge_rows._merge_rows and name[:4] in ("out_", "lse_", "tota", "stri"):
        numbers = {"out_": "*bf16", "lse_": "*fp32", "tota": "*fp32", "stri": "*i64"}
        return "i32" if name == "total_token" else numbers[name[:4]]
    if kernel is attend_prompt._attend_prompt and name == "out_ptr":
        return "*bf16"
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


def main() -> None:
    for kernel, constants in KERNELS:
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else kind(kernel, n, constants) for n in names}
        constexprs = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__, len(made.asm["cubin"]))


if __name__ == "__main__":
    main()
