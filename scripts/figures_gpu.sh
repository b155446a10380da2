#!/usr/bin/env bash
# Makes the results that docs/figures.md lists, on a machine with a GPU, in stages by cost.
#
#   MODEL=model.gguf OUT=out scripts/figures_gpu.sh [STAGE...]
#
# MODEL  the long-context model, a GGUF file or a folder. OUT: where results go. PYTHON: default python3
# Stages with the seconds that each may take: attention 60, table1 60, pieces 20, codes 60, mha 150, scout 180,
# ablation 90, thresholds 90, growing 150, long 420 (not run unless named).
# Random weights and keys in every row of bench; picks of scout are driven to the change rate that stage `attention`
# measures at 32k (--change), lists of hgca are cut to --kept. A stage that is run again goes on where it stopped.
set -uo pipefail
: "${MODEL:?the long-context model}" "${OUT:?a folder for results}"
PYTHON=${PYTHON:-python3} CHANGE=${CHANGE:-0.21} KEPT=${KEPT:-0.02,0.25}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
started=$(date +%s)
left=0

go() { # NAME ARGUMENTS...: one command within what is left of the stage
    local name=$1 begun
    shift
    begun=$(date +%s)
    if ((left < 5)); then echo "$name: no time left" && return; fi
    timeout --signal=INT --kill-after=10 "$left" "$PYTHON" -m coattn "$@" >"$OUT/$name.log" 2>&1
    echo "$name: $? after $(($(date +%s) - begun)) s; $(grep -a . "$OUT/$name.log" | tail -1 | cut -c1-160)"
    left=$((left - ($(date +%s) - begun)))
}

real=(--model "$MODEL" --dtype bfloat16)

one() {
    case $1 in
    attention) # HGCA figures 3, 4, 5; ScoutAttention table 1, figure 6, the change rate
        left=60
        go attention_32k eval attention "${real[@]}" --prefill 32000 --decode 32 --budget 2048 --out "$OUT/attention_qwen_32k.json"
        go scout_fig6 bench scout --figure 6 "${real[@]}" --prefill 30720 --decode 128 --out "$OUT/scout_fig6_qwen_32k.json"
        ;;
    table1) # HGCA table 1: windows of a quarter, a half and three quarters of the text, by beta
        left=60
        go hgca_table1 eval sweep "hgca-paper,window_blocks=64|128|192,beta=0.25|0.5|1" "hgca,window_blocks=64,beta=1" \
            "${real[@]}" --prefill 7936 --decode 256 --out "$OUT/hgca_table1_qwen_8k.json"
        ;;
    pieces) # ScoutAttention figure 2
        left=20
        go scout_fig2 bench scout --figure 2 --out "$OUT/scout_fig2.json"
        ;;
    codes) # HCAttention figure 4; the codebook is made of the default text, the figure of its end
        left=60
        go hc_book calibrate hcattention "${real[@]}" --groups 32 --plain --out "$OUT/book32.safetensors"
        go hc_fig4 eval codes "${real[@]}" --codebook "$OUT/book32.safetensors" --out "$OUT/hcattention_fig4_qwen.json"
        ;;
    mha) # HGCA figures 6, 10, 11, 12 in shapes whose query heads do not share KV
        left=150
        for figure in 6 11 12 10; do
            go "hgca_fig$figure" bench hgca --figure $figure --shapes llama-2-7b --batch 1,4 --context 8192 \
                --window 2048 --kept "$KEPT" --steps 16 --seconds 1 --out "$OUT/hgca_fig${figure}_llama2_7b.json"
        done
        go hgca_fig12_opt bench hgca --figure 12 --shapes opt-6.7b --batch 4 --context 2048 --window 512 \
            --kept "$KEPT" --steps 16 --seconds 1 --peers --out "$OUT/hgca_fig12_opt_6.7b.json"
        ;;
    scout) # ScoutAttention figures 3, 8, 9, 10, 11
        left=180
        for figure in 11 9; do
            go "scout_fig$figure" bench scout --figure $figure --shapes qwen3-8b --context 32768 --batch 8,16 \
                --change "$CHANGE" --seconds 2 --steps 32 --out "$OUT/scout_fig${figure}_32k.json"
        done
        go scout_fig8 bench scout --figure 8 --shapes qwen3-8b --methods full,hgca,infinigen,scout --context 32768 \
            --batch 16 --gpu-memory 80GiB --change "$CHANGE" --seconds 2 --steps 32 --out "$OUT/scout_fig8_32k.json"
        go scout_fig10 bench scout --figure 10 --shapes qwen3-8b --context 32768 --batch 8 --gpu-memory 80GiB \
            --change "$CHANGE" --seconds 2 --steps 32 --out "$OUT/scout_fig10_32k.json"
        ;;
    ablation) # ScoutAttention figure 12
        left=90
        go scout_fig12 bench scout --figure 12 --shapes qwen3-8b --context 32768 --batch 8 --set ahead_from=1 \
            --change "$CHANGE" --seconds 2 --steps 32 --out "$OUT/scout_fig12_32k.json"
        ;;
    thresholds) # HCAttention table 3 and figure 3 by the paper's own rule, table 4 with codebooks of the prompt
        left=90
        go hc_table3 eval sweep "hcattention-paper,groups=0,tau=0.3|0.5|0.7|0.9|1" hcattention,groups=0 "${real[@]}" \
            --prefill 16128 --decode 128 --out "$OUT/hcattention_table3_qwen_16k.json"
        go hc_table4 eval sweep "hcattention-paper,tau=1,groups=16|32,centroids=256|1024|4096|8192" "${real[@]}" \
            --prefill 8064 --decode 128 --out "$OUT/hcattention_table4_qwen_8k.json"
        ;;
    growing) # HGCA figure 13: one sequence that grows by 4,096 tokens
        left=150
        go hgca_fig13 bench requests --shapes llama-2-7b --methods hgca --set window_blocks=64 --count 1 \
            --prompts fixed:512 --new fixed:4096 --max-batch 1 --no-floor --out "$OUT/hgca_fig13_llama2_7b.json"
        go full_fig13 bench requests --shapes llama-2-7b --methods full --count 1 \
            --prompts fixed:512 --new fixed:4096 --max-batch 1 --no-floor --out "$OUT/full_fig13_llama2_7b.json"
        ;;
    long) # HGCA figure 15: to 16k tokens, in GPT-NeoX-20B's shapes
        left=420
        go hgca_fig15 bench requests --shapes gpt-neox-20b --methods hgca --set window_blocks=128 --count 1 \
            --prompts fixed:512 --new fixed:15872 --max-batch 1 --no-floor --out "$OUT/hgca_fig15_neox_20b.json"
        ;;
    *) echo "There is no stage $1; the head of this file names them." >&2 && exit 2 ;;
    esac
    echo "-- $1 done, $(($(date +%s) - started)) s in all"
}

if (($# == 0)); then set -- attention table1 pieces codes mha scout ablation thresholds growing; fi
for name in "$@"; do one "$name"; done
tar czf "$OUT/figures.tar.gz" -C "$OUT" $(cd "$OUT" && ls ./*.json ./*.png 2>/dev/null)
