#!/usr/bin/env bash
# Collects what `coattn serve` needs into results/local/lib, in the versions installed here, for a machine without a network:
#   scripts/serve_wheels.sh [PYTHON_VERSION] [MACHINE]     such as 3.12 x86_64
# There: PYTHONPATH=results/local/lib coattn bench requests --http ...
# pydantic-core and llguidance are compiled: their wheels are for one platform, pydantic-core's for one Python, too.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
VERSION=${1:-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
MACHINE=${2:-$(uname -m)}
OUT=results/local/lib
rm -rf "$OUT"
mapfile -t wanted < <("$PYTHON" - <<'PY'
import importlib.metadata as metadata
import re

found, left = {}, ["fastapi", "uvicorn", "prometheus-client", "llguidance"]
while left:
    name = left.pop()
    if name in found or name == "click":  # coattn itself needs it
        continue
    found[name] = metadata.version(name)
    needs = [each for each in metadata.requires(name) or () if "extra ==" not in each]
    for each in needs:
        other = re.match(r"[\w.-]+", each)[0].lower().replace("_", "-")
        try:
            metadata.version(other)
            left.append(other)
        except metadata.PackageNotFoundError:
            pass  # for another platform or Python
print("\n".join(f"{name}=={version}" for name, version in sorted(found.items())))
PY
)
platforms=(--platform any --platform "manylinux2014_$MACHINE")
for glibc in 17 24 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${glibc}_$MACHINE"); done
"$PYTHON" -m pip install --quiet --no-deps --target "$OUT" --only-binary :all: --implementation cp --python-version "$VERSION" \
  "${platforms[@]}" "${wanted[@]}"
find "$OUT" -name __pycache__ -prune -exec rm -rf {} +
echo "${wanted[@]}"
du -sh "$OUT"
