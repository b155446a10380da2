"""The CPU core: typed access to the extension `coattn._native` (worker pool, kernels, arena, limits).

Importing this module starts nothing: the pool is created by the first call that needs it. Every call releases the
GIL. Tensors are on the CPU; pointers and strides are handed over, nothing is copied.

Terms: a *block* is `block` tokens of all KV heads; one (block, head) holds `[K rows | V rows]`, see `block_layout`.
"""

from coattn.native.attend import Attended, attend, plan_attend
from coattn.native.blocks import Arena, BlockLayout, Blocks, block_layout
from coattn.native.call import Call, Pending
from coattn.native.core import ELEMENTS, NativeError, element_of
from coattn.native.entries import Entries, plan_weighted_sum, weighted_sum
from coattn.native.faults import abandon_pool, inject_fault
from coattn.native.limits import (
    gather_gbps,
    job_latency,
    random_gather_gbps,
    spin_gaps,
    stream_read_gbps,
)
from coattn.native.machine import (
    CpuFeatures,
    IsaStatus,
    attend_kernel_name,
    cpu_features,
    default_threads,
    fail_on_worker,
    force_isa,
    forced_isa,
    isa,
    isas,
    set_spin_us,
    set_threads,
    threads,
    worker_cpus,
)
from coattn.native.rows import Kept, Lists, Pace, fill_rows, plan_keep_rows, put_rows

__all__ = [
    "ELEMENTS",
    "Arena",
    "Attended",
    "BlockLayout",
    "Blocks",
    "Call",
    "CpuFeatures",
    "Entries",
    "IsaStatus",
    "Kept",
    "Lists",
    "NativeError",
    "Pace",
    "Pending",
    "abandon_pool",
    "attend",
    "attend_kernel_name",
    "block_layout",
    "cpu_features",
    "default_threads",
    "element_of",
    "fail_on_worker",
    "fill_rows",
    "force_isa",
    "forced_isa",
    "gather_gbps",
    "inject_fault",
    "isa",
    "isas",
    "job_latency",
    "plan_attend",
    "plan_keep_rows",
    "plan_weighted_sum",
    "put_rows",
    "random_gather_gbps",
    "set_spin_us",
    "set_threads",
    "spin_gaps",
    "stream_read_gbps",
    "threads",
    "weighted_sum",
    "worker_cpus",
]
