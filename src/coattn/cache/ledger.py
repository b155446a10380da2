"""Bytes per tier: what is held, what may be held."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from coattn.errors import BudgetError
from coattn.types import Tier
from coattn.units import format_apart, format_enough

PLACE = {"gpu": "in the GPU tier", "host": "in DRAM"}


@dataclass(frozen=True)
class Dram:
    """What the machine, or its container, had when KV memory was opened."""

    total: int
    free: int
    """Bytes that tiers without a limit of their own may take."""
    tiers: tuple[Tier, ...]
    """That lie there: without a GPU both."""


@dataclass
class Ledger:
    """Counts the KV bytes of each tier and refuses to go past a limit. A limit of None means unlimited, but for what
    the machine has (`dram`), where that is known.

    Where layers lie on several devices, `divide` makes a ledger for each: what it takes counts in the whole one too.
    """

    gpu: int | None = None
    host: int | None = None
    dram: Dram | None = None
    device: str = ""
    """Of a part: the device's name."""
    whole: Ledger | None = field(default=None, repr=False, compare=False)
    """Of a part: what it is a part of."""
    parts: list[Ledger] = field(default_factory=list, repr=False, compare=False)
    held: dict[Tier, int] = field(default_factory=lambda: {"gpu": 0, "host": 0})
    peak: dict[Tier, int] = field(default_factory=lambda: {"gpu": 0, "host": 0})
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def divide(self, devices: Sequence[str], gpu: Sequence[int | None], host: Sequence[int]) -> None:
        """Makes a part for each device, with its own limit in the GPU tier.

        host: how many bytes each would take in DRAM, in any unit: a limit there is divided by it.
        """
        for name, own, share in zip(devices, gpu, host, strict=True):
            there = None if self.host is None else self.host * share // max(1, sum(host))
            self.parts.append(Ledger(own, there, None, name, self))

    def blank(self) -> Ledger:
        """One of the same limits that holds nothing."""
        made = Ledger(self.gpu, self.host, self.dram)
        made.parts = [Ledger(part.gpu, part.host, None, part.device, made) for part in self.parts]
        return made

    def part(self, stage: int) -> Ledger:
        """The ledger of a device; this one, where there is but one."""
        return self.parts[stage] if self.parts else self

    def gpu_in_all(self) -> int | None:
        """The limits of the GPU tier, of all devices; None: some have none."""
        limits = [part.gpu for part in self.parts or [self]]
        return None if None in limits else sum(limit or 0 for limit in limits)

    def describe(self) -> dict[str, int]:
        """KV bytes of each tier, now and at most, as reports name them."""
        now = {f"{tier}_kv_bytes": count for tier, count in self.held.items()}
        return now | {f"{tier}_kv_peak": count for tier, count in self.peak.items()}

    def limit(self, tier: Tier) -> int | None:
        return self.gpu if tier == "gpu" else self.host

    def room(self, tier: Tier) -> int | None:
        """Bytes that may still be taken; None when there is no limit. Of DRAM also what the machine has; the GPU tier
        of a machine without a GPU has no limit here, since windows are chosen by it."""
        limit = self.limit(tier)
        own = self._spare() if tier == "host" and limit is None else None
        if limit is not None:
            own = max(0, limit - self.held[tier])
        all_of_it = None if self.whole is None else self.whole.room(tier)
        return all_of_it if own is None else own if all_of_it is None else min(own, all_of_it)

    def left(self, tier: Tier) -> int | None:
        """The same for memory that takes all it can get: also of the GPU tier what the machine has."""
        room, whole = self.room(tier), self.whole or self
        if room is not None or whole.dram is None or tier not in whole.dram.tiers:
            return room
        return whole._spare()

    def _spare(self) -> int | None:
        return None if self.dram is None else max(0, self.dram.free - self.in_dram())

    def in_dram(self) -> int:
        """Bytes that are held of the machine's memory."""
        return 0 if self.dram is None else sum(self.held[tier] for tier in self.dram.tiers)

    def require(self, tier: Tier, count: int, what: str) -> None:
        """Raises BudgetError, naming the minimum, when `count` more bytes do not fit. Takes nothing."""
        limit, dram = self.limit(tier), self.dram
        if limit is not None and self.held[tier] + count > limit:
            self.refuse(tier, count, what)
        if dram is None or tier not in dram.tiers:
            return
        most = dram.free if limit is None else dram.total
        if self.in_dram() + count > most:
            needed, there = format_apart(self.in_dram() + count, most)
            has, lower = f"the {there} of this machine are all there is", f"{tier}_kv to {most} bytes or less"
            if limit is None:
                has, lower = f"only {there} is free for it on this machine", "max_length, max_batch or the window"
            raise BudgetError(
                f"{what} needs {needed} of KV memory in DRAM, but {has}.",
                f"Lower {lower}, or free memory: {most} bytes can be taken.",
            )

    def refuse(self, tier: Tier, count: int, what: str) -> NoReturn:
        """Raises the BudgetError of `count` bytes more than what is held."""
        need, option, limit = self.held[tier] + count, f"{tier}_kv", self.limit(tier)
        on = f" of {self.device}" if self.device and tier == "gpu" else ""
        if tier == "host" and self.whole is not None and limit and self.whole.host:
            need, limit = -(-need * self.whole.host // limit), self.whole.host  # one limit was given for all devices
        needed, allowed = format_apart(need, self.held[tier] if limit is None else limit)
        raise BudgetError(
            f"{what} needs at least {needed} of KV memory {PLACE[tier]}{on}, but {option} is {allowed}.",
            f"Raise {option} to {format_enough(need)} or more, shorten the context, "
            + ("or use a method that keeps less there." if tier == "gpu" else "or free memory."),
            need,
        )

    def take(self, tier: Tier, count: int, what: str) -> None:
        with self._lock:  # what is chosen off the steps takes memory too
            self.require(tier, count, what)
            if self.whole is not None:
                self.whole.take(tier, count, what)
            self.held[tier] += count
            self.peak[tier] = max(self.peak[tier], self.held[tier])

    def give(self, tier: Tier, count: int) -> None:
        with self._lock:
            if count > self.held[tier]:
                raise ValueError(f"gave back {count} bytes of the {tier} tier, which holds {self.held[tier]}")
            self.held[tier] -= count
            if self.whole is not None:
                self.whole.give(tier, count)
