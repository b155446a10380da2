"""What a rule makes that promises how large the error of attention's output is: it measures that while steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from coattn.cache.step_table import StepTable
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.types import Selection, Step


class Tally(Protocol):
    """What was measured of one sequence so far; it grows as steps run."""

    def plus(self, others: Sequence[Any]) -> Tally:
        """Together with others of its kind."""

    def summary(self) -> dict[str, Any]:
        """The numbers, for a report."""


class Audit(Protocol):
    """Measures decode steps of one group of layers. What it raises costs no step anything."""

    def plan(self, step: Step) -> None:
        """A decode step is about to run."""

    def note(
        self, call: AttentionCall, table: StepTable, selection: Selection, states: Sequence[State], out: Tensor
    ) -> None:
        """A layer has attended: out `[rows, q_heads, d]`, merged from the states of the selection's works.

        On a GPU this runs on a side stream, until `joined`.
        """

    def joined(self) -> None:
        """The step's own streams have waited for the side stream."""

    def commit(self, step: Step) -> None:
        """The step is over."""

    def abort(self) -> None:
        """The step failed."""

    def truncate(self, slot: int, keep: int) -> None:
        """A sequence has only its first `keep` tokens from now on."""

    def of(self, slot: int) -> Tally:
        """What is measured of a sequence."""

    def report(self) -> dict[str, Any]:
        """What is measured of all sequences."""

    def release(self) -> None:
        """Stops what it started."""


@runtime_checkable
class Audited(Protocol):
    """A rule whose promise is measured."""

    def make_audit(self) -> Audit | None:
        """After the rule was opened; None where nothing can be left out."""
