"""What every part of a method shares: a name, parameters, needs and provides."""

from __future__ import annotations

import math
import sys
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from coattn.errors import ConfigError

if TYPE_CHECKING:
    from coattn.types import Step


@dataclass
class Part:
    """One answer on one axis. A part never knows method names; it says what it needs and what it provides.

    The fields of the dataclass that `__init__` takes are the part's parameters; `help_text` explains each. A parameter
    belongs to one part.
    """

    axis: ClassVar[str]
    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    help_text: ClassVar[dict[str, str]] = {}
    takes_gpu_dtype: ClassVar[bool] = False
    """Whether it works where blocks in GPU memory are in 8 or 4 bits: it leaves reading them to the executor."""
    capturable: ClassVar[bool] = True
    """Whether its part of a decode step can be captured in a CUDA graph: nothing on the host, no synchronisation."""

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Parameter name -> default."""
        return {f.name: None if f.default is MISSING else f.default for f in fields(cls) if f.init}

    def is_exact(self) -> bool:
        """Whether nothing is lost with the parameters it has; a method is exact if all its parts are."""
        return True

    def whole(self, tokens: int) -> dict[str, Any] | None:
        """Parameters under which this part leaves nothing out of sequences of at most so many tokens.

        None: it cannot, or does not say. `coattn methods --check` compares a row with full attention under these.
        """
        return {}

    def check(self, config: Any) -> None:
        """Raises ConfigError where its parameters and those of the cache, a CacheConfig, do not go together."""

    def uncaptured(self) -> str | None:
        """Why a decode step with this part cannot be captured in a CUDA graph, or None. After it was opened."""
        return None if self.capturable else "its class says `capturable = False`"

    def report(self, step: Step) -> dict[str, Any]:
        """What it has to say of the last decode step, for reports. May wait for the GPU."""
        return {}

    def release(self) -> None:
        """Gives every byte back to the ledger, and stops what it started."""


MOST = (1 << 31) - 1
"""No count is larger."""
MOST_BATCH = 1 << 16
"""No batch is larger: lists of every sequence are made before anything else is known."""


def check_count(name: str, value: object, least: int, most: int = MOST, *, unset: bool = False) -> None:
    """Raises ConfigError unless `value` is a whole number from `least` to `most`; unset: or None."""
    if unset and value is None:
        return
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        raise ConfigError(f"{name} is {value:,}, but can be {most:,} at most.", f"Set {name}={most} or less.")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} is {value!r}, but must be a whole number of at least {least}.", f"Set {name}={least} or more."
        )


def check_number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Raises ConfigError unless `value` is a finite number from `low` to `high`; above: `low` itself is refused."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        within = low < value if above else low <= value
        if within and value <= min(high, sys.float_info.max):  # false of nan
            return
    start = f"above {low:g}" if above else f"of at least {low:g}"
    end = "" if high == math.inf else f" and at most {high:g}"
    kind = "a finite number" if high == math.inf else "a number"
    raise ConfigError(f"{name} is {value!r}, but must be {kind} {start}{end}.", f"Set {name} to such a number.")
