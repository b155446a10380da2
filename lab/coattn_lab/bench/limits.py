"""What the machine's links give: measured in the run whose rows stand beside it."""

from __future__ import annotations

from typing import Any

import torch

from coattn import native
from coattn.cache.host_memory import host_memory
from coattn_lab.bench import core_limits

GPU_BYTES = 4 << 30
HOST_BYTES = 2 << 30
PIECE = 4096
"""int32 of a gathered piece: 16 KiB, one block of 32 tokens and 128 channels in bfloat16."""


NONE: dict[str, Any] = dict.fromkeys(
    ("dram_gbps", "dram_stream_gbps", "threads", "hbm_gbps", "pcie_gbps", "pcie_gather_gbps")
)
"""What may be measured, before it is."""


def measure(device: torch.device, host_bytes: int = HOST_BYTES) -> dict[str, Any]:
    """GB/s: HBM read; PCIe by one large copy, and by a kernel that gathers blocks; DRAM gathered, and front to back."""
    threads = native.default_threads()
    found = NONE | {
        "dram_gbps": core_limits.random_gather_gbps(threads, 16384, host_bytes),
        "dram_stream_gbps": core_limits.stream_read_gbps(threads, host_bytes),
        "threads": threads,
    }
    if device.type == "cuda":
        found |= _gpu(device)
    return found


def hbm_gbps(device: torch.device) -> float:
    """GB/s at which a GPU reads its own memory."""
    from coattn_lab.bench.read_kernel import read_gbps

    memory = torch.zeros(GPU_BYTES // 4, dtype=torch.int32, device=device)
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    return read_gbps(memory, 8192, programs, gather=False)


def _gpu(device: torch.device) -> dict[str, Any]:
    from coattn_lab.bench.read_kernel import read_gbps

    hbm = hbm_gbps(device)
    memory = torch.zeros(GPU_BYTES // 4, dtype=torch.int32, device=device)
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    host = host_memory(HOST_BYTES, device).view(torch.int32)
    gather = read_gbps(host, PIECE, programs // 8, gather=True)
    target = memory[: len(host)]
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return {"hbm_gbps": hbm, "pcie_gbps": HOST_BYTES / best / 1e9, "pcie_gather_gbps": gather}
