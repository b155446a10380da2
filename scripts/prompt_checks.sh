#!/bin/sh
# Prompts on a machine with a GPU: kernels, methods beside plain Transformers, and a floor. Takes about three minutes.
# Usage: scripts/prompt_checks.sh OUT
set -eu
out=${1:?usage: scripts/prompt_checks.sh OUT}
mkdir -p "$out"
coattn doctor
coattn bench prompt-kernels --out "$out/prompt_kernels.json"
for shapes in qwen3-8b llama-3-8b; do
  coattn bench prefill --shapes "$shapes" --tokens 32768 --chunk 2048,8192,whole --gpu-kv none --floor \
    --methods transformers,scout,hgca,hcattention --out "$out/prefill_${shapes}_32k.json"
done
coattn bench prefill --shapes qwen3-8b --tokens 131072 --chunk 8192 --gpu-kv none --floor \
  --methods transformers,scout --out "$out/prefill_qwen3-8b_128k.json"
