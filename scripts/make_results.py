"""Write the tables of results in README.md, docs/results.md and results/README.md; or --check what is stale.

results/readme.toml lists the rows of README.md's tables; see evaluate/readme_table.py and readme_tasks.py. Refuses a
result that names no clean commit. Does nothing while README.md has no markers for them.
Usage: python scripts/make_results.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from coattn.errors import CoattnError
from coattn.evaluate import readme_tasks
from coattn.evaluate.readme_table import table
from coattn.evaluate.report import BEGIN, END, fill, page, read_folder

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Writes what is stale, or with --check exits with 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is stale")
    check = parser.parse_args().check
    try:
        found = stale(ROOT)
    except CoattnError as error:
        raise SystemExit(f"{error} {error.hint}") from None
    for name, text in found.items():
        if check:
            print(f"{name} is stale: run `python scripts/make_results.py`.", file=sys.stderr)
        else:
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    sys.exit(1 if check and found else 0)


def stale(root: Path) -> dict[str, str]:
    """Pages under `root` that are not as the result files say: name -> what it should be."""
    readme, folder = _read(root / "README.md"), root / "results"
    if BEGIN not in readme and END not in readme:
        return {}
    results = read_folder(folder, published=True)
    tasks = readme_tasks.readme_part(folder)
    part = table(folder, root) + (f"\n{tasks}" if tasks else "")
    part += "\nEvery result, with its command: [results/README.md](results/README.md).\n"
    pages = {"README.md": fill(readme, part), "results/README.md": page(results, folder)}
    every = _read(root / "docs" / "results.md")
    if readme_tasks.BEGIN in every:
        made = readme_tasks.results_part(folder)
        before, after = every.split(readme_tasks.BEGIN)[0], every.split(readme_tasks.END)[1]
        pages["docs/results.md"] = f"{before}{readme_tasks.BEGIN}\n\n{made}\n{readme_tasks.END}{after}"
    return {name: text for name, text in pages.items() if _read(root / name) != text}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
