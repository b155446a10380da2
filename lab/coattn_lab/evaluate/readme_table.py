"""README's one table: what a method costs and how good it is, at the same settings.

`results/readme.toml` lists its rows. Each names a row of a speed result (a benchmark of
decode steps) and, for a method that is not exact, a row of a quality result (`coattn-lab eval sweep`):

    [[row]]
    speed = "decode_qwen3_8b_32k.json"
    method = "hgca"
    where = { batch = 4, context = 32768, kept_share = 0.07 }
    quality = "sweep_smollm2_pride.json"
    sweep_row = "hgca,window_blocks=128,beta=16"

`where` is needed only as far as the file has several rows of the method; its names are keys of the row, or parameters.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.cells import markdown, model, size, spread, windows
from coattn_lab.evaluate.renamed import in_names_of_today
from coattn_lab.evaluate.results import fault, read_result
from coattn_lab.evaluate.speed_rows import EVERY_ROW
from coattn_lab.evaluate.wording import LENGTHS, deciding, share

Data = Mapping[str, Any]
MOST = 8
HEAD = ("method", "batch, context", "GPU KV, DRAM KV", "ms a step, x floor", "tokens/s", "x `full`",
        "x Transformers", "perplexity / full, KL", "also simulated", "files")  # fmt: skip
NONE = "No result has been measured from this source yet.\n"
ALIKE = 0.15
"""By how much the kept share of an assumed list may differ from that of the quality row, as a part of it."""
FREE = ("codebook", "capacity", "groups", "centroids", *LENGTHS)
"""Parameters that are not compared by themselves: the file a codebook lies in and how many groups it has, of which the
channels of a group are compared, since models differ in their head size; room that is set aside; and, where lists are
assumed, what decides how long they are, of which the kept share is compared."""
CODE = ("group_width", "code_centroids")


@dataclass(frozen=True)
class Wanted:
    """One row to be."""

    speed: str
    method: str
    where: Data = field(default_factory=dict)
    quality: str | None = None
    sweep_row: str | None = None


@dataclass(frozen=True)
class Joined:
    """A row of speed with everything it is compared with."""

    wanted: Wanted
    result: Data
    row: Data
    quality: Data | None
    """The row of quality; None for methods that are exact."""
    subject: str
    """Model and text of the quality row."""


def read_list(path: Path) -> list[Wanted]:
    """The rows that a list asks for; none where there is no list."""
    if not path.exists():
        return []
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("row", [])
        found = [Wanted(**row) for row in rows]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"{path.name} cannot be read: {error}.", "See the head of readme_table.py.") from None
    if len(found) > MOST:
        raise InputError(f"{path.name} has {len(found)} rows.", f"README's table has at most {MOST}: leave some out.")
    return found


def table(folder: Path, base: Path) -> str:
    """The part of README between its markers. Links start from folder `base`."""
    wanted = read_list(folder / "readme.toml")
    if not wanted:
        return NONE
    joined = [join(each, folder) for each in wanted]
    link = folder.relative_to(base).as_posix()
    return markdown(HEAD, [_cells(each, link) for each in joined]) + "\n" + _caption(joined)


def join(wanted: Wanted, folder: Path) -> Joined:
    """Finds the rows and checks that they belong together. Raises InputError where they do not."""
    result = _read(folder, wanted.speed)
    row = _one(result, wanted)
    if not row.get("simulated"):
        raise InputError(f"{wanted.speed} does not say what is simulated.", "Measure it again.")
    if wanted.quality is None:
        if not _exact(wanted.method):
            raise InputError(f"{wanted.method} is not exact, and its row has no quality.", "Name a quality result.")
        return Joined(wanted, result, row, None, "")
    quality = _read(folder, wanted.quality)
    rows = [each for each in quality.get("rows", []) if each.get("row") == wanted.sweep_row]
    if len(rows) != 1:
        raise InputError(f"{wanted.quality} has no row {wanted.sweep_row!r}.", "Give it as the file has it.")
    difference = unlike(row, rows[0])
    if difference:
        raise InputError(
            f"{wanted.speed} and {wanted.quality} measured {wanted.method} at unlike settings: {difference}.",
            "Measure one of them at the other's settings.",
        )
    subject = f"{model(quality)}, {windows(quality)}"
    return Joined(wanted, result, row, rows[0], subject)


def unlike(speed: Data, quality: Data) -> str | None:
    """The first setting in which two rows differ, or None. Parameters that either does not know do not count."""
    if speed["method"] != quality["method"]:
        return f"method {speed['method']} and {quality['method']}"
    own, other = speed.get("settings") or {}, quality.get("params") or {}
    if not own:
        return "the speed result does not record its settings"
    assumed = speed.get("kept_share")
    for name in sorted(own.keys() & other.keys()):
        free = name in FREE and (name not in LENGTHS or assumed is not None)
        if not free and own[name] != other[name]:
            return f"{name} {own[name]} and {other[name]}"
    for name in CODE if "groups" in own else ():
        mine, its = (speed.get("notes") or {}).get(name), quality.get(name)
        if mine is None or mine != its:
            return f"{name} {mine} and {its}"
    if assumed is None:
        return None
    kept = quality.get("kept_mean")
    if kept is None:
        return "the quality result does not record the kept share"
    return None if abs(kept - assumed) <= ALIKE * kept else f"kept {share(assumed)} and {share(kept)}"


def times(joined: Joined, method: str) -> str:
    """Tokens per second as a multiple of another method's in the same run: at the same batch, or, where every method
    had the largest batch that fits in the same memory, with its batch named. Empty where the run has no such row."""
    row, rows = joined.row, joined.result["rows"]
    same = [r for r in rows if r["method"] == method and all(r[k] == row[k] for k in ("shapes", "context", "dtype"))]
    beside = [r for r in same if r["batch"] == row["batch"]]
    if not beside and joined.result.get("memory"):
        beside = same
    if len(beside) != 1 or row["method"] == method:
        return ""
    other = "" if beside[0]["batch"] == row["batch"] else f" (its batch {beside[0]['batch']})"
    return f"{row['tokens_per_s'] / beside[0]['tokens_per_s']:.2f}{other}"


def _cells(joined: Joined, link: str) -> Sequence[str]:
    row, quality, wanted = joined.row, joined.quality, joined.wanted
    files = [f"[speed]({link}/{wanted.speed})"]
    good = "exact"
    if quality is not None:
        good = f"{quality['ratio']:.4f}{spread(quality.get('ratio_95'))}, {quality['kl']:.2g}"
        files.append(f"[quality]({link}/{wanted.quality})")
    return (
        ", ".join([f"`{row['method']}`", *deciding(row)]),
        f"{row['batch']}, {row['context']:,}",
        f"{size(row['gpu_kv_bytes'])}, {size(row['host_kv_bytes'])}",
        f"{row['ms_per_step']:.2f}, {_floor(row)}",
        f"{row['tokens_per_s']:,.0f}",
        times(joined, "full"),
        times(joined, "transformers-full"),
        good,
        "; ".join(word for word in row["simulated"] if word not in EVERY_ROW),
        ", ".join(files),
    )


def _floor(row: Data) -> str:
    """How many times its floor a step takes."""
    floor = row.get("floor_ms")
    return f"{row['ms_per_step'] / floor:.2f}" if floor else "no floor"


def _caption(joined: Sequence[Joined]) -> str:
    where = sorted({_where(each) for each in joined})
    subjects = sorted({each.subject for each in joined if each.subject})
    quality = f" Quality: {'; '.join(subjects)}; the interval is 95%, KL in nats, which tells more." if subjects else ""
    every = "Speed is measured on random weights, keys and values"
    ratios = (
        "A step makes one token of every sequence. Its floor is the time that its bytes need at rates measured in the "
        'same run. "x `full`" and "x Transformers" are ratios of tokens/s in the same run, empty where it has no such '
        "row; Transformers runs its own code with a dynamic cache."
    )
    return f"{every}: {'; '.join(where)}. {ratios}{quality}\n"


def _where(joined: Joined) -> str:
    hardware = joined.result.get("hardware") or {}
    machine = hardware.get("gpu") or hardware.get("cpu") or "a machine without a name"
    cores = f" and {hardware['cores']} CPU cores" if "cores" in hardware else ""
    return f"{joined.row['shapes']} in {joined.row['dtype']} on {machine}{cores}"


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        raise InputError(f"readme.toml names {name}, which is not in {folder.name}/.", "Correct the list.")
    result = in_names_of_today(read_result(folder / name))
    why = fault(result)
    if why:
        raise InputError(f"{name} may not be published: {why}.", "Make it again from a clean commit.")
    return result


def _one(result: Data, wanted: Wanted) -> Data:
    def has(row: Data) -> bool:
        known = {**(row.get("settings") or {}), **(row.get("params") or {}), **row}
        return row["method"] == wanted.method and all(known.get(k) == v for k, v in wanted.where.items())

    found: list[Data] = [row for row in result["rows"] if has(row)]
    if len(found) != 1:
        raise InputError(
            f"{wanted.speed} has {len(found)} rows of {wanted.method} {dict(wanted.where) or ''}".rstrip() + ".",
            "Give `where` so that there is one.",
        )
    return found[0]


def _exact(method: str) -> bool:
    from coattn.method.row import compose
    from coattn.method.table import find_method
    from coattn_lab.bench.peer import PEERS

    return method in PEERS or compose(find_method(method)).exact
