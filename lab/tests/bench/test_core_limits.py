"""Limits of the CPU and its memory are measured, and refuse what cannot be."""

import pytest
import torch

from coattn import native
from coattn_lab.bench import core_limits


def test_limits_are_measured():
    assert core_limits.stream_read_gbps(1, 1 << 22, 2) > 0.1
    assert core_limits.random_gather_gbps(1, 16384, 1 << 22, 2) > 0.1
    with pytest.raises(native.NativeError, match="cannot be gathered"):
        core_limits.random_gather_gbps(1, 100, 1 << 20, 1)


def test_the_gather_limit_reads_the_kernel_s_own_blocks():
    layout = native.block_layout("int8", 32, 128)
    blocks = native.Blocks(torch.zeros(40, 2 * layout.bytes, dtype=torch.uint8), "int8", 32, 2, 128)
    table = torch.randperm(40, dtype=torch.int32).view(2, 1, 20)
    assert core_limits.gather_gbps(blocks, table, threads=2, repeats=2) > 0.1
    table[1, 0, 3] = 40
    with pytest.raises(native.NativeError, match="Block 40 is not one of 40"):
        core_limits.gather_gbps(blocks, table, repeats=1)
    with pytest.raises(native.NativeError, match="nothing to gather"):
        core_limits.gather_gbps(blocks, table[:0], repeats=1)
