#!/usr/bin/env bash
# Makes the results that docs/figures.md lists, on a machine with a GPU.
#
#   MODEL=model.gguf OUT=out lab/scripts/figures_gpu.sh [STAGE...]
#
# MODEL  the long-context model, a GGUF file or a folder. OUT: where results go. PYTHON: default python3
# CHANGE the share of scout's picks that change in a step, as stage `quality` measures it at 32k; default 0.19
# ONLY   names of commands, separated by "|", where not all of a stage are wanted: ONLY="hgca_fig10|hgca_fig12"
# KEPT   the shares of DRAM's entries that heads of hgca attend to; default 0.02,0.25
# Stages with the seconds that each may take: quality 85, hgca 190, scout 190.
# Stage `quality` runs the real model in five processes side by side: nothing in it is timed. The others time random
# weights, keys and values, one row after the other in one process; picks of scout are driven to CHANGE, lists of hgca
# cut to KEPT. A command that is cut off leaves what it has, as unfinished; the others stay.
set -uo pipefail
: "${MODEL:?the long-context model}" "${OUT:?a folder for results}"
PYTHON=${PYTHON:-python3} CHANGE=${CHANGE:-0.19} KEPT=${KEPT:-0.02,0.25} ONLY=${ONLY:-.*}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
started=$(date +%s)
real="--model $MODEL --dtype bfloat16"

many() { # NAME SECONDS: commands from standard input, in one process
    grep -E "^($ONLY) " | timeout --kill-after=10 "$2" "$PYTHON" "$(dirname "$0")/many.py" "$(($2 - 3))" 2>"$OUT/$1.log"
}

one() {
    case $1 in
    quality)
        many attention 85 <<END &
attention_32k 50 eval attention $real --prefill 32000 --decode 32 --budget 2048 --out $OUT/attention_qwen_32k.json
scout_fig6 60 bench scout --figure 6 $real --prefill 30720 --decode 128 --out $OUT/scout_fig6_qwen_32k.json
END
        many table1 85 <<END &
hgca_table1 80 eval sweep "hgca-paper,window_blocks=64|128|192,beta=0.25|0.5|1" "hgca,window_blocks=64,beta=1" $real --prefill 7936 --decode 256 --out $OUT/hgca_table1_qwen_8k.json
END
        many codes 85 <<END &
hc_book 50 calibrate hcattention $real --groups 32 --plain --out $OUT/book32.safetensors
hc_fig4 50 eval codes $real --codebook $OUT/book32.safetensors --out $OUT/hcattention_fig4_qwen.json
hc_blocks 60 eval needle $real --method hcattention --set prefill_block=4096 --set anchor=4096 --lengths 8192,16384 --out $OUT/hcattention_blocks_qwen_16k.json
END
        many table3 85 <<END &
hc_table3 80 bench hcattention --table 3 $real --length 16256 --decode 128 --out $OUT/hcattention_table3_qwen_16k.json
END
        many table4 85 <<END &
hc_table4 80 eval sweep "hcattention-paper,tau=1,groups=16|32,centroids=256|1024|4096|8192" $real --prefill 8064 --decode 128 --out $OUT/hcattention_table4_qwen_8k.json
END
        wait
        ;;
    hgca) # figures 6, 10, 11, 12, 13, 15 in shapes whose query heads do not share KV
        many hgca 190 <<END
hgca_fig6 25 bench hgca --figure 6 --shapes llama-2-7b --batch 1,4 --context 4096 --steps 16 --seconds 0.5 --out $OUT/hgca_fig6_llama2_7b.json
hgca_fig11 25 bench hgca --figure 11 --shapes llama-2-7b --batch 1,4 --context 4096 --window 1024 --kept $KEPT --steps 16 --seconds 0.5 --out $OUT/hgca_fig11_llama2_7b.json
hgca_fig12 60 bench hgca --figure 12 --shapes opt-6.7b --batch 4 --context 2048 --window 512 --kept 0.25 --steps 16 --seconds 0.5 --peers --out $OUT/hgca_fig12_opt_6.7b.json
hgca_fig13 25 bench hgca --figure 13 --shapes llama-2-7b --batch 1 --context 1024,2048,4096,8192 --window 512 --kept 0.25 --steps 16 --seconds 0.5 --out $OUT/hgca_fig13_llama2_7b.json
hgca_fig10 25 bench hgca --figure 10 --shapes llama-2-7b --batch 4 --context 4096 --window 2048 --steps 16 --seconds 0.5 --out $OUT/hgca_fig10_llama2_7b.json
hgca_fig15 30 bench hgca --figure 15 --shapes gpt-neox-20b --batch 1 --context 4096,16384 --window 4096 --kept 0.25 --steps 16 --seconds 0.5 --out $OUT/hgca_fig15_neox_20b.json
END
        ;;
    scout) # figures 2, 3, 8 to 12
        many scout 190 <<END
scout_fig2 15 bench scout --figure 2 --out $OUT/scout_fig2.json
scout_fig11 40 bench scout --figure 11 --shapes qwen3-8b --context 16384 --batch 8,16 --change $CHANGE --seconds 1 --steps 24 --out $OUT/scout_fig11_16k.json
scout_fig12 30 bench scout --figure 12 --shapes qwen3-8b --context 16384 --batch 8 --set ahead_from=1 --change $CHANGE --seconds 1 --steps 24 --out $OUT/scout_fig12_16k.json
scout_fig8 60 bench scout --figure 8 --shapes qwen3-8b --methods full,hgca,infinigen,scout --context 16384 --batch 16 --gpu-memory 40GiB --change $CHANGE --seconds 1 --steps 24 --out $OUT/scout_fig8_16k.json
scout_fig10 30 bench scout --figure 10 --shapes qwen3-8b --context 16384 --batch 8 --gpu-memory 40GiB --change $CHANGE --seconds 1 --steps 24 --out $OUT/scout_fig10_16k.json
END
        ;;
    *) echo "There is no stage $1: quality, hgca, scout." >&2 && exit 2 ;;
    esac
    echo "-- $1: $(($(date +%s) - started)) s in all"
}

if (($# == 0)); then set -- quality hgca scout; fi
for name in "$@"; do one "$name"; done
tar czf "$OUT/figures.tar.gz" -C "$OUT" $(cd "$OUT" && ls ./*.json ./*.png 2>/dev/null)
