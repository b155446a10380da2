#!/usr/bin/env bash
# Makes the results that docs/figures.md names, on a machine with a GPU. A command that fails leaves the others.
#
#   MODEL=model.gguf OUT=out lab/scripts/figures_gpu.sh [NAME...]     such as hgca_fig10; default: all
#
# CHANGE: the share of scout's picks that change in a step, default 0.19. PYTHON: default python3.
set -uo pipefail
: "${MODEL:?the long-context model}" "${OUT:?a folder for results}"
CHANGE=${CHANGE:-0.19}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
real="--model $MODEL --dtype bfloat16"
short="--steps 16 --seconds 0.5"
driven="--shapes qwen3-8b --context 16384 --change $CHANGE --seconds 1 --steps 24"

while read -r name command; do
  (($# == 0)) || [[ " $* " == *" $name "* ]] || continue
  echo "== $name"
  eval "${PYTHON:-python3} -m coattn_lab $command --out $OUT/$name.json" </dev/null
done <<END
attention eval attention $real --prefill 32000 --decode 32 --budget 2048
hgca_table1 eval sweep "hgca-paper,window_blocks=64|128|192,beta=0.25|0.5|1" $real --prefill 7936 --decode 256
hgca_fig6 bench hgca --figure 6 --shapes llama-2-7b --batch 1,4 --context 4096 $short
hgca_fig10 bench hgca --figure 10 --shapes llama-2-7b --batch 4 --context 4096 --window 2048 $short
hgca_fig11 bench hgca --figure 11 --shapes llama-2-7b --batch 1,4 --context 4096 --window 1024 --kept 0.02,0.25 $short
hgca_fig12 bench hgca --figure 12 --shapes opt-6.7b --batch 4 --context 2048 --window 512 --kept 0.25 --peers $short
hgca_fig13 bench hgca --figure 13 --shapes llama-2-7b --batch 1 --context 1024,2048,4096,8192 --window 512 --kept 0.25 $short
hgca_fig15 bench hgca --figure 15 --shapes gpt-neox-20b --batch 1 --context 4096,16384 --window 4096 --kept 0.25 $short
scout_fig2 bench scout --figure 2
scout_fig6 bench scout --figure 6 $real --prefill 30720 --decode 128
scout_fig8 bench scout --figure 8 --methods full,hgca,infinigen,scout --batch 16 --gpu-memory 40GiB $driven
scout_fig10 bench scout --figure 10 --batch 8 --gpu-memory 40GiB $driven
scout_fig11 bench scout --figure 11 --batch 8,16 $driven
scout_fig12 bench scout --figure 12 --batch 8 --set ahead_from=1 $driven
hcattention_table3 eval sweep "hcattention-paper,tau=0.3|0.5|0.7|0.9|1" $real --prefill 8064 --decode 128
hcattention_table4 eval sweep "hcattention-paper,tau=1,groups=16|32,centroids=256|1024|4096|8192" $real --prefill 8064 --decode 128
END
