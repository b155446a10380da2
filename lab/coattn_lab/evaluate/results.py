"""Result files: what was run, what is done so far, and where it comes from. A run that was cut off goes on."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.method.row import Composed
from coattn.provenance import provenance

Summarise = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
"""Finished parts -> the figures of the whole."""


NOTES = ("gpu_kv_peak", "host_kv_peak", "seconds", "runs")
"""What a run notes beside its parts."""


class Results:
    """The parts of one evaluation, in a file that is rewritten as they finish.

    target: the file; None keeps them in memory. config: all that decides the outcome; a file with another config is
    refused. items: what the list of parts is called there. key: which entry of a part is its name. every: seconds
    between two writes at least, where parts come fast; `save` writes what is left.
    """

    def __init__(
        self,
        target: Path | None,
        config: Mapping[str, Any],
        summarise: Summarise,
        *,
        items: str,
        key: str,
        every: float = 0.0,
    ) -> None:
        self.target, self.config, self.summarise = target, _plain(config), summarise
        self.items, self.key = items, key
        self.done: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, Any] = {}
        self.every, self._written, self._unsaved = every, 0.0, False
        self.origin = provenance()
        self.earlier: list[dict[str, Any]] = []
        """Provenance of the runs that this one goes on from."""
        self.found: dict[str, Any] | None = None
        """The result as the file has it, until a part is added."""
        if target is not None:
            self._resume(target)

    def add(self, part: dict[str, Any]) -> None:
        """A finished part. Writes the file."""
        self._go_on()
        self.done[part[self.key]] = part
        self._unsaved = True
        if time.monotonic() - self._written >= self.every:
            self.save()

    def save(self) -> None:
        """Writes the parts that are not written yet."""
        if self.target is not None and self._unsaved:
            write_json(self.target, self.as_dict(complete=False))
        self._unsaved, self._written = False, time.monotonic()

    def note(self, peak: Mapping[str, int], seconds: float) -> None:
        """What the parts took: the most bytes of all runs, the seconds of all runs together."""
        found = self.notes
        found |= {name: max(value, found.get(name, 0)) for name, value in peak.items()}
        found["seconds"] = round(found.get("seconds", 0) + seconds, 1)

    def finish(self, order: Sequence[str]) -> dict[str, Any]:
        """The result, its parts in this order. Writes the file, unless it was finished before and nothing is new."""
        if self.found is not None and self.found.get("complete"):
            return self.found
        self._go_on()
        self.done = {name: self.done[name] for name in order}
        result = self.as_dict(complete=True)
        if self.target is not None:
            write_json(self.target, result)
        self.found, self._unsaved = result, False
        return result

    def as_dict(self, complete: bool) -> dict[str, Any]:
        """Figures, parts, config, provenance."""
        parts = list(self.done.values())
        resumed = {"resumed": self.earlier} if self.earlier else {}
        state = {**self.config, "complete": complete, **self.notes}
        return {**self.summarise(parts), self.items: parts, **state, **self.origin, **resumed}

    def _resume(self, target: Path) -> None:
        found = read_result(target) if target.exists() and target.stat().st_size else None
        if found is None:
            return
        own = {key: found.get(key) for key in self.config}
        if own != self.config:
            raise InputError(_difference(target, own, self.config), "Choose another --out, or remove the file.")
        try:
            self.done = {part[self.key]: part for part in found.get(self.items, [])}
        except (KeyError, TypeError):
            raise InputError(
                f"{target} has results that are not those of such a run.", "Choose another --out, or remove the file."
            ) from None
        self.notes = {key: found[key] for key in NOTES if key in found}
        self.found = found

    def _go_on(self) -> None:
        """The first new part: from here on the file is this run's, and says what it goes on from."""
        if self.found is None:
            return
        last = {key: self.found.get(key) for key in ("command", "commit", "tree", "versions", "hardware")}
        self.earlier, self.found = [*self.found.get("resumed", []), last], None


def describe(composed: Composed) -> dict[str, Any]:
    """The method of a result: its row, its parts, every parameter with its value."""
    row = composed.method
    return {"method": row.name, "exact": composed.exact, "params": dict(composed.params), "row": dict(row.parts())}


def is_clean(commit: object) -> bool:
    """Whether a recorded commit is there and says nothing of changes."""
    return isinstance(commit, str) and re.fullmatch("[0-9a-f]{7,40}", commit) is not None


def read_result(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a result file.", "Choose another path, or remove the file.")
    return found


def fault(result: Mapping[str, Any]) -> str | None:
    """Why a result may not be published: it does not say what made it, or it is not finished. None: it may."""
    for part in (result, *result.get("resumed", [])):
        if not part.get("commit"):
            return "it names no commit"
        if not is_clean(part["commit"]):
            return f"commit {part['commit']} is not a clean one"
        if not part.get("tree"):
            return "it has no hash of the source"
    if result.get("unfinished") or not result.get("complete", True):
        return "it is not finished"
    return None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces the file at once, so that an interrupt leaves the old one or the new one; a device is written to."""
    text = json.dumps(data, indent=2, default=str, ensure_ascii=False) + "\n"
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back."""
    plain: dict[str, Any] = json.loads(json.dumps(data, default=str))
    return plain


def _difference(path: Path, own: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    key = next(key for key in wanted if own.get(key) != wanted[key])
    before, now, names = own.get(key), wanted[key], [key]
    while isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        key = next(key for key in now if before[key] != now[key])
        before, now, names = before[key], now[key], [*names, key]
    return f"{path} holds a run with another {' of '.join(reversed(names))}: {_short(before)}, not {_short(now)}."


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
