#!/usr/bin/env bash
# Installs a wheel where there is no compiler and runs it: `coattn doctor`, three lines of Python, and the refusal of a C++
# core that is not the wheel's. Prints its size, and seconds: of PyTorch, of `pip install` of the other dependencies, of the
# wheel itself, of what is run. DEMO=1: README's example in Python and its three commands run, too, with the embedded model
# in place of a large one, and `coattn demo`; what README does on a machine that has neither model nor compiler.
# Usage: scripts/check_wheel.sh WHEEL     PYTHON=python3.12 TORCH=torch==2.13.0 DEMO=1 scripts/check_wheel.sh WHEEL
set -euo pipefail
wheel=$(realpath "${1:?Usage: scripts/check_wheel.sh WHEEL}")
readme=$(realpath "$(dirname "$0")/../README.md")
folder=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; wait "$server" || true; fi; rm -rf "$folder"' EXIT
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
lap() { # WHAT: says how many seconds it took since the last call
  local tenths=$(((${EPOCHREALTIME/[.,]/} - since) / 100000))
  printf '%s: %d.%d s\n' "$1" $((tenths / 10)) $((tenths % 10))
  since=${EPOCHREALTIME/[.,]/}
}
since=${EPOCHREALTIME/[.,]/}
"${pip[@]}" "${TORCH:-torch==2.13.0}"
lap "pip install of PyTorch, which the machine has before"
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
lap "pip install of the other dependencies"
"${pip[@]}" --no-index --no-deps "$wheel"
lap "pip install of the wheel"
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
lap "doctor, an import, a help text"
if [ -n "${DEMO:-}" ]; then
  "${pip[@]}" "$wheel[serve]"
  python - "$readme" <<'PY'
import re
import sys

section = open(sys.argv[1]).read().split("\n## Use\n")[1].split("\n## ")[0].replace("Qwen/Qwen2.5-7B-Instruct", "smollm2")
program, commands = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "sh"))
lines = [line.split("  #")[0].rstrip() for line in commands.splitlines()]
assert [line.split()[1] for line in lines] == ["plan", "generate", "serve"], "README has other commands"
open("use.py", "w").write(program)
lines[1] += " --max-new-tokens 64"  # the small model repeats itself
open("two.sh", "w").write("\n".join(lines[:2]) + "\n")
open("serve.sh", "w").write(f"exec {lines[2]}\n")
open("book.txt", "w").write("Ada Lovelace was born in London in 1815. She wrote the first program for a machine.\n")
PY
  export COATTN_CACHE=$folder/cache
  python use.py
  lap "README's example, the embedded model fetched for it"
  sh -e two.sh
  lap "coattn plan and coattn generate"
  sh serve.sh &
  server=$!
  python - <<'PY'
import json
import time
import urllib.request

asked = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions",
    json.dumps({"prompt": "Once upon a time", "max_tokens": 64}).encode(),
    {"Content-Type": "application/json"},
)
for second in range(120):
    try:
        print(json.load(urllib.request.urlopen(asked))["choices"][0]["text"])
        break
    except OSError:  # it is not there yet, or loading
        time.sleep(1)
else:
    raise SystemExit("check_wheel: the server did not answer in two minutes")
PY
  kill "$server"
  wait "$server" || true
  server=
  lap "coattn serve, until it has answered"
  coattn demo
  lap "coattn demo"
fi
hash=$(python -c 'import coattn.native as n; print(n.__path__[0])')/source_hash.txt
echo "of another wheel" >"$hash"
if python -c 'import coattn.native' 2>refused.txt; then echo "check_wheel: a core of other sources is taken" >&2; exit 1; fi
python - "$wheel" <<'PY'
import os
import sys

assert "is not the one of the wheel" in open("refused.txt").read()
print(f"{os.path.getsize(sys.argv[1]) / 2**20:.2f} MiB")
PY
