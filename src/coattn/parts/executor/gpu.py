"""The GPU, over what lies in GPU memory."""

from dataclasses import dataclass

from torch import Tensor

from coattn.kernels.attend import attend
from coattn.kernels.average import attend_averaging
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, State
from coattn.state import AttnState
from coattn.types import BlockWork, Term


@dataclass
class Gpu(Executor):
    """Attends on the layer's own device to blocks there, and adds the terms that a rule knows. Part of every row."""

    name = "gpu"
    runs = frozenset({"gpu", "term"})
    takes_gpu_dtype = True

    def run(self, call: AttentionCall, work: BlockWork | Term) -> State:
        if isinstance(work, Term):
            return AttnState(work.out, work.lse)
        memory, cap, table = self.cache.gpu.memory.rows(call.layer), call.shape.softcap, call.table
        if table is None:
            return attend(call.q, memory, work.blocks, call.scale, cap)
        average, stamp = call.index.observed(call.layer), table.bridge.timestamp_slot(call.layer, "gpu")
        if average is not None:
            assert isinstance(memory, Tensor), "an index that averages reads the model's own numbers"
            return attend_averaging(call.q, memory, work.blocks, call.scale, cap, average, stamp)
        return attend(call.q, memory, work.blocks, call.scale, cap, stamp)
