"""Makes the texts that `auto` was measured on: essays.txt and source.txt, 1,400,000 characters each.

    python scripts/make_texts.py FOLDER

Essays come with RULER's data (`pip install 'coattn[eval]'`), source is that of Python's own library, whose version
matters: results name the SHA-256 of their text. The third text, Python's help topics, is made by `coattn eval` itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from importlib.util import find_spec
from pathlib import Path

CHARACTERS = 1_400_000
MADE = {
    "essays": "6f5849888947162ea4c6c1e2017b1b2e57b32a8fa5c57f643e72b3ef9780b922",
    "source": "d49c8459f5c73b89f8898619acad93cac0b51b5878442f40033ea95875f094b0",
}
"""Of the texts in results/; source by Python 3.11.7."""


def essays() -> str:
    """Paul Graham's, as RULER hides needles in them."""
    package = find_spec("long_context_eval")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("RULER's essays are not installed: pip install 'coattn[eval]'.")
    path = Path(package.submodule_search_locations[0], "data/synthetic/json/PaulGrahamEssays.json")
    text: str = json.loads(path.read_text(encoding="utf-8"))["text"]
    return text


def source() -> str:
    """Python's own modules, one after the other."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in files)


def main() -> None:
    """Writes both, and says whether they are those of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("essays", essays), ("source", source)):
        text = make()[:CHARACTERS].encode()
        (folder / f"{name}.txt").write_bytes(text)
        same = hashlib.sha256(text).hexdigest() == MADE[name]
        print(f"{name}.txt: {'as in results/' if same else 'not the text of results/: another version'}")


if __name__ == "__main__":
    main()
