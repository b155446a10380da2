#!/usr/bin/env bash
# One stage of the tables of docs/results.md: quality and milliseconds of a step of every row from the same run, on a machine with a
# GPU. Ends with 3 while rows are left: run it again; what is whole stays. A stage takes less than 8 minutes.
#
#   MODEL=FOLDER PROMPTS=p16.jsonl.gz OUT=out/qwen1.5b.json bash lab/scripts/results_gpu.sh
#
# PROMPTS: files of `coattn-lab eval tasks make`, with spaces between. ROWS, BUDGETS, LIMIT (prompts of each task and length), BATCH,
# MINUTES (no row begins after them) and PYTHON have the defaults below.
set -euo pipefail
: "${MODEL:?the model}" "${PROMPTS:?files of prompts}" "${OUT:?a JSON file for the table}"
export PYTHONUNBUFFERED=1
rows=(
  full
  auto
  scout
  hcattention,tau=0.9\|0.98
  hgca,beta=0.5\|1
  quest
  duo
  snapkv
  pqcache
  infinigen
)
given=()
for each in $PROMPTS; do given+=(--prompts "$each"); done
mkdir -p "$(dirname "$OUT")"
"${PYTHON:-python3}" -m coattn_lab eval table --model "$MODEL" --out "$OUT" "${given[@]}" --dtype bfloat16 \
  --rows "${ROWS:-$(IFS=,; echo "${rows[*]}")}" --budget "${BUDGETS:-6.25%,12.5%,25%,50%}" --limit "${LIMIT:-3}" \
  --batch "${BATCH:-16}" --kl 32 --minutes "${MINUTES:-5}"
