"""Everything that is stored."""

from dataclasses import dataclass

from coattn.parts.call import AttentionCall
from coattn.parts.select.base import Select
from coattn.types import Selection


@dataclass
class Everything(Select):
    """Attends to every token that the cache still has."""

    name = "everything"
    takes_gpu_dtype = True
    capturable = True

    def pick(self, call: AttentionCall) -> Selection:
        return call.visible
