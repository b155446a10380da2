"""The CPU core: typed access to the extension `coattn._native` (worker pool, kernels, arena, limits).

Importing this module starts nothing: the pool is created by the first call that needs it. Every call releases the
GIL. Tensors are on the CPU; pointers and strides are handed over, nothing is copied.

Terms: a *block* is `block` tokens of all KV heads; one (block, head) holds `[K rows | V rows]`, see `block_layout`.
"""

from coattn.native.attend import Attended, plan_attend
from coattn.native.blocks import Arena, BlockLayout, Blocks, Values, block_layout
from coattn.native.call import Call, Pending
from coattn.native.core import NativeError, element_of
from coattn.native.machine import (
    abandon_pool,
    default_threads,
    force_isa,
    isa,
    isas,
    set_spin_us,
    set_threads,
    threads,
    worker_cpus,
)
from coattn.native.rows import Kept, Lists, Pace, fill_rows, plan_keep_rows
from coattn.native.weighted_sum import plan_weighted_sum
