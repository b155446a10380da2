"""What a runtime shows of its steps to measurements."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.step.layer_group import LayerGroup
from coattn.types import Selection, Step


class Probe:
    """Sees a runtime's steps, and changes nothing. Override what is of interest.

    A captured step shows what it does once, when it is captured: probes are for steps that are not.
    """

    def open(self, runtime: Any) -> None:
        """A `Runtime` has been opened whose steps it will see. Untyped here, since runtimes know probes."""

    def begin(self, step: Step) -> None:
        """A step begins."""

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """A layer is about to attend: q `[tokens, q_heads, d]`, k, v `[tokens, kv_heads, d]`, packed."""

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        """What a layer of a decode step attends to, and the results before they are merged."""

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        """What the layer's attention gives, like q."""

    def commit(self, step: Step) -> None:
        """The step is over."""

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """A sequence has only its first `keep` tokens from now on."""
