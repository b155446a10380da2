#!/usr/bin/env bash
# Installs a wheel where there is no compiler and runs it: `coattn doctor`, three lines of Python, and the refusal of a C++
# core that is not the wheel's. Prints its size and the seconds that it took beside its dependencies, which come first.
# Usage: scripts/check_wheel.sh WHEEL     PYTHON=python3.12 TORCH=torch==2.13.0 scripts/check_wheel.sh WHEEL
set -euo pipefail
wheel=$(realpath "${1:?Usage: scripts/check_wheel.sh WHEEL}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
# nothing but this environment and what every program needs: no compiler
mkdir "$folder/bin"
for name in env sh uname cat ls rm; do ln -s "$(command -v $name)" "$folder/bin/"; done
export PATH=$folder/venv/bin:$folder/bin
unset PYTHONPATH
for name in cc c++ gcc g++ clang cmake ninja; do
  if command -v $name >/dev/null; then echo "check_wheel: $name is on PATH" >&2; exit 1; fi
done
cd "$folder"
pip=(python -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "${TORCH:-torch==2.13.0}"
python - "$wheel" <<'PY' >needs.txt
import sys
import zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as file:
    names = file.namelist()
    text = file.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
assert "coattn/py.typed" in names, "py.typed is missing"
assert "coattn/native/source_hash.txt" in names, "the hash of the sources is missing"
assert not [name for name in names if "csrc" in name or name.split("/")[0] in ("tests", "docs", "lab")], "sources, tests or pages are inside"
print("\n".join(each for each in Parser().parsestr(text).get_all("Requires-Dist") if "extra ==" not in each))
PY
"${pip[@]}" --requirement needs.txt
start=$(python -c 'import time; print(time.time())')
"${pip[@]}" --no-index --no-deps "$wheel"
coattn doctor
python - <<'PY'
import torch

import coattn
from coattn import merge
from coattn.kernels.attend import attend
from coattn.native import isa

assert {"LLM", "attach"} <= set(dir(coattn))
print("coattn", coattn.__version__, "with the kernels for", isa())
PY
coattn plan --help >/dev/null
python -c "import time; print(f'installed and ran in {time.time() - $start:.1f} s')"
hash=$(python -c 'import coattn.native as n; print(n.__path__[0])')/source_hash.txt
echo "of another wheel" >"$hash"
if python -c 'import coattn.native' 2>refused.txt; then echo "check_wheel: a core of other sources is taken" >&2; exit 1; fi
python - "$wheel" <<'PY'
import os
import sys

assert "is not the one of the wheel" in open("refused.txt").read()
print(f"{os.path.getsize(sys.argv[1]) / 2**20:.2f} MiB")
PY
