"""The picks of a decode step: lists at fixed addresses, filled and renewed by kernels alone."""

import torch

from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.kernels.lists import Lists, Rows
from coattn.types import LayerShape


class Picks:
    """One rule's lists, for at most `batch` sequences: one of each layer.

    What the CPU reads of them lies in mapped host memory, and is not written again before the step is over.
    """

    def __init__(self, layers: dict[int, LayerShape], batch: int, ring: int, places: int) -> None:
        self.layers, self.batch, self.ring, self.places = layers, batch, ring, places
        self.made: dict[int, Lists] = {}
        """By layer that has picked."""

    def lists(self, layer: int, count: int) -> Lists:
        """Where a layer's pick of `count` blocks goes."""
        if layer not in self.made or self.made[layer].chosen.shape[-1] < count:
            self.made[layer] = self._make(layer, count, True)
        return self.made[layer]

    def nothing(self, layer: int) -> Lists:
        return self._make(layer, 1, False)

    def attended(self, seqs: int) -> tuple[float, float] | None:
        """Entries that the first rows of the last step attended to on the GPU and in DRAM: the mean over all heads.

        Waits for the GPU.
        """
        if not self.made:
            return None
        gpu = sum(lists.gpu_lens[:seqs].float().mean(1).sum().item() for lists in self.made.values())
        host = sum(lists.host_lens[:seqs].float().mean(1).sum().item() for lists in self.made.values())
        return gpu / len(self.made), host / len(self.made)

    def _make(self, layer: int, count: int, mapped: bool) -> Lists:
        shape = self.layers[layer]
        heads, places = shape.kv_heads, self.places
        size = self.batch * heads * (count + 1)
        if mapped and shape.device.type == "cuda":
            memory = host_memory(4 * size, shape.device).view(torch.int32)
        else:
            memory = torch.zeros(size, dtype=torch.int32, device=shape.device)
        host, host_lens = torch.split(memory, [self.batch * heads * count, self.batch * heads])
        whole, real = torch.int32, torch.float32
        kinds = ((max(count, places) + self.ring, whole), (0, whole), (count, whole), (count, real), (places, real))
        gpu, gpu_lens, chosen, wanted, worth = (
            torch.zeros((self.batch, heads, width) if width else (self.batch, heads), dtype=dtype, device=shape.device)
            for width, dtype in kinds
        )
        host = host.view(self.batch, heads, count)
        return Lists(gpu, gpu_lens, host, host_lens.view(self.batch, heads), chosen, wanted, worth)


def rows_of(table: StepTable) -> Rows:
    """A step table's columns as kernels take them."""
    names = ("host_blocks", "host_lens", "gpu_blocks", "gpu_lens", "seq", "write_block", "flush_to")
    return Rows(*(table.column(name) for name in names))
