#!/usr/bin/env bash
# Makes the tables of docs/results.md on a machine with a GPU; a run that was cut off goes on where it stopped.
#
#   MODEL=model.gguf PROMPTS=prompts OUT=out lab/scripts/results_gpu.sh
#
# PROMPTS: a folder with qwen16.jsonl.gz and qwen32.jsonl.gz (`coattn-lab eval tasks make`). LIMIT: prompts of each task at
# 16k and 32k, default "3,2". BATCH: prompts at a time, default 24. BUDGET: default 12.5%. PYTHON: default python3.
set -euo pipefail
: "${MODEL:?the long-context model}" "${PROMPTS:?a folder of prompts}" "${OUT:?a folder for results}"
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
"${PYTHON:-python3}" -m coattn_lab eval table --model "$MODEL" --out "$OUT/qwen.json" --budget "${BUDGET:-12.5%}" \
  --prompts "$PROMPTS/qwen16.jsonl.gz" --prompts "$PROMPTS/qwen32.jsonl.gz" --limit "${LIMIT:-3,2}" \
  --rows "full,auto,scout,hcattention,hgca,quest,duo,snapkv,pqcache" --batch "${BATCH:-24}" --dtype bfloat16 --kl 16
