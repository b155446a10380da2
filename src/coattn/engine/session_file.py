"""A session on disk: one sealed file. All of it is checked before anything is stored."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from coattn.engine.store import sealed
from coattn.errors import InputError, one_line
from coattn.folders import cache_dir

FORMAT = "coattn-session-2"
SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
SAVED_HINT = "Delete it and start again, or open it as it was saved."


class Sessions:
    """A folder of them, by name."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: by default `sessions` in coattn's cache folder."""
        self.folder = cache_dir() / "sessions" if folder is None else folder

    def path(self, name: object) -> Path:
        """Where a session is, or would be. Raises InputError for what is no name."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or name.endswith("."):
            raise InputError(
                f"{str(name)[:80]!r} is no name of a session.",
                "A name has 1 to 64 letters (a to z), digits, dots, dashes and underscores, a letter or digit first.",
            )
        return self.folder / (name + SUFFIX)

    def names(self) -> list[str]:
        """Of all that are saved."""
        found = (each.name.removesuffix(SUFFIX) for each in self.folder.glob("*" + SUFFIX))
        return sorted(name for name in found if NAME.fullmatch(name))

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def delete(self, name: str) -> None:
        """Raises InputError where there is none."""
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            raise InputError(f"There is no session {name!r} to delete.", self._hint()) from None
        except OSError as error:
            where = f"Look at who may write in {self.folder}."
            raise InputError(f"Session {name!r} cannot be deleted: {error.strerror}.", where) from None

    def check(self, name: str) -> None:
        """Raises InputError where a session of this name could not be saved. Leaves nothing but the folder."""
        self.path(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(b"x")
        except OSError as error:
            raise self._unsaved(name, error) from None

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Written under another name and renamed: a reader sees the old file or the new one."""
        path = self.path(name)
        try:
            sealed.write(path, tensors, facts, FORMAT)
        except (OSError, SafetensorError) as error:
            raise self._unsaved(name, error) from None
        return path

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts, as they were saved. Raises InputError where anything differs by a bit."""
        path = self.path(name)
        try:
            return sealed.read(path, FORMAT)
        except FileNotFoundError:
            raise InputError(f"There is no session {name!r}.", self._hint()) from None
        except sealed.DAMAGED as error:
            raise InputError(f"Session {name!r} is damaged: {one_line(error)}.", SAVED_HINT) from None

    def _unsaved(self, name: str, error: Exception) -> InputError:
        hint = f"{self.folder} must take files and have room; COATTN_CACHE or session_dir names another place."
        return InputError(f"Session {name!r} cannot be saved: {one_line(error)}.", hint)

    def _hint(self) -> str:
        names = self.names()
        return f"Saved are: {', '.join(names[:20])}." if names else "None is saved."
