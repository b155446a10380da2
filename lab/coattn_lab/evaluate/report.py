"""A folder of results as Markdown: tables by kind, figures, and where each result comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.cells import Row, markdown
from coattn_lab.evaluate.kind import Kind
from coattn_lab.evaluate.renamed import in_names_of_today
from coattn_lab.evaluate.results import fault, is_clean, read_result
from coattn_lab.evaluate.tables import KINDS, kind_of

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@dataclass(frozen=True)
class Found:
    """One result file."""

    path: Path
    kind: str
    data: dict[str, Any]

    def figures(self) -> list[Path]:
        """Pictures beside it: the same name, or one that goes on behind it with an underscore or a hyphen."""
        stem, others = self.path.stem, {path.stem for path in self.path.parent.glob("*.json")} - {self.path.stem}
        beside = [path for path in sorted(self.path.parent.glob("*.png")) if path.stem not in others]
        return [path for path in beside if path.stem == stem or path.stem.startswith((f"{stem}_", f"{stem}-"))]


@dataclass
class Folder:
    """What a folder holds. left_out: `(file name, why)`."""

    results: list[Found] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def by_kind(self) -> list[tuple[Kind, list[Found]]]:
        """Results of each kind that there is, in the order of the page."""
        found = [(kind, [each for each in self.results if each.kind == name]) for name, kind in KINDS.items()]
        return [(kind, results) for kind, results in found if results]


def read_folder(folder: Path, published: bool = False) -> Folder:
    """Every result below the folder, by name. Raises InputError when there is none.

    published: there may be none, what lies in `local` is left out, and one that may not be published raises InputError.
    """
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}.", "Give the folder with the JSON files of --out.")
    found = Folder()
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder))
        if published and name.startswith("local"):
            continue
        try:
            data = in_names_of_today(read_result(path))
        except InputError:
            found.left_out.append((name, "not a JSON object"))
            continue
        why = fault(data) if published else None
        if why:
            raise InputError(
                f"{name} may not be published: {why}.",
                "Make it again from a clean commit, or remove it; COATTN_COMMIT names the commit of a copied source.",
            )
        kind = kind_of(data)
        if kind is None:
            found.left_out.append((name, "not a result that has a table"))
        else:
            found.results.append(Found(path, kind, data))
    if not published and not found.results:
        raise InputError(
            f"{folder} holds no results.", "Write some with --out, as in `coattn-lab eval needle --out FILE`."
        )
    return found


def page(folder: Folder, base: Path) -> str:
    """The whole page; links start from folder `base`."""
    parts = ["# Results\n", sections(folder, base) or "There are none yet.\n"]
    if folder.left_out:
        parts.append("## Left out\n\n" + "".join(f"- {name}: {reason}\n" for name, reason in folder.left_out))
    return "\n".join(parts)


def sections(folder: Folder, base: Path) -> str:
    """A section for each kind that there is."""
    made = []
    for kind, results in folder.by_kind():
        lines = [f"## {kind.title}\n", *_tables(kind, results)]
        if kind.note:
            lines.append(f"{kind.note}\n")
        lines.append("".join(source(result, base) for result in results))
        lines += [f"![{path.stem}]({_link(path, base)})\n" for each in results for path in each.figures()]
        made.append("\n".join(lines))
    return "\n".join(made)


def _tables(kind: Kind, results: list[Found]) -> list[str]:
    """One table; or one for each set of conditions, so that only what was measured under the same stands together."""
    if kind.group is None:
        return [markdown(kind.head, [row for each in results for row in kind.rows(each.data)])]
    groups: dict[str, list[Row]] = {}
    for each in results:
        for name, row in zip(kind.group(each.data), kind.rows(each.data), strict=True):
            where = machine(each.data)
            groups.setdefault(f"{name}; {where}" if where else name, []).append(row)
    return [f"{name}:\n\n{markdown(kind.head, rows)}" for name, rows in groups.items()]


def machine(data: dict[str, Any]) -> str:
    """The GPU, or else the CPU, and the cores."""
    hardware = data.get("hardware") or {}
    cores = f"{hardware['cores']} cores" if "cores" in hardware else ""
    return ", ".join(part for part in (hardware.get("gpu") or hardware.get("cpu") or "", cores) if part)


def source(result: Found, base: Path) -> str:
    """One line: the file, the command, the machine, the versions, the commit."""
    data = result.data
    versions = data.get("versions") or {}
    parts = [f"[{result.path.name}]({_link(result.path, base)})", f"`{data.get('command', '')}`"]
    parts.append(machine(data))
    parts.append(f"torch {versions['torch']}" if "torch" in versions else "")
    parts.append(f"commit {data['commit'][:12]}" if is_clean(data.get("commit")) else "")
    why = fault(data)
    parts.append(f"**not to be published: {why}**" if why else "")
    parts.append(f"went on {len(data['resumed'])} time(s)" if data.get("resumed") else "")
    return "- " + ", ".join(part for part in parts if part) + "\n"


def fill(readme: str, part: str) -> str:
    """The README with `part` between its markers; as it was when there are none."""
    if BEGIN not in readme and END not in readme:
        return readme
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise InputError(f"The page must hold {BEGIN} and {END}, once each, in this order.", "Correct the markers.")
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return f"{before}{BEGIN}\n{part}{END}{after}"


def _link(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()
