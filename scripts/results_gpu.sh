#!/usr/bin/env bash
# Makes the data of docs/results.md on a machine with a GPU, from one commit, in stages that go on where they stopped.
#
#   MODEL=model.gguf PROMPTS=prompts OUT=out scripts/results_gpu.sh [STAGE...]
#
# MODEL    the long-context model: a GGUF file, or a folder
# SMOL     the small model, for stage small8; default: smollm2
# PROMPTS  a folder with qwen16.jsonl.gz, qwen32.jsonl.gz and smol8.jsonl.gz (`coattn eval tasks make`)
# OUT      where results go; a stage that is run again does what is missing
# LIMIT    prompts of each task: four numbers, for 16k, 32k, 8k and for plain Transformers at 16k; default "4 2 4 2"
# SECONDS_OF  what the stages may take: three numbers, for main16, main32 and small8; default "190 160 80"
# BATCH    prompts at a time; default 24. BUDGETS16: default 12.5%,25%,6%. PYTHON: default python3
#
# Stages: main16, main32, small8, merge. A stage runs its rows in four or five processes on one GPU: what the CPU
# attends to in one, so that it has all cores, `auto` in one, what the GPU fetches in one, what lies in GPU memory in
# one, plain Transformers in one. Each reads the prompts for itself. Quality needs no idle GPU; `ms a step` does, so
# 16 steps of each row are timed while the other processes wait (--turns). Within a process rows run one after the
# other, at the first budget before the others, so a stage that is cut off has whole rows: files that say
# "complete": true. GPU memory: KV of all prompts in each process (192 MiB a prompt at 16k), and a batch of `full`.
# results.tar.gz in OUT holds what is to be kept; scripts/make_results.py makes the pages of it.
set -uo pipefail
: "${MODEL:?the long-context model}" "${PROMPTS:?a folder of prompts}" "${OUT:?a folder for results}"
SMOL=${SMOL:-smollm2} BATCH=${BATCH:-24} PYTHON=${PYTHON:-python3} BUDGETS16=${BUDGETS16:-12.5%,25%,6%}
read -r LIMIT16 LIMIT32 LIMIT8 PLAIN16 <<<"${LIMIT:-4 2 4 2}"
read -r TIME16 TIME32 TIME8 <<<"${SECONDS_OF:-190 160 80}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
started=$(date +%s)

declare -A ROWS=(
    [gpu]=full,streaming,quest,duo,snapkv,h2o,tova
    [cpu]=scout,hcattention,hgca
    [auto]=auto
    [pull]=infinigen,alpha=5,pqcache
)

rows() { # STAGE GROUP SECONDS MODEL PROMPTS NAME LIMIT BUDGETS ROWS [MORE...]: one process of a stage
    local stage=$1 group=$2 limit=$3 begun threads=2
    begun=$(date +%s)
    [ "$group" = cpu ] && threads=$(nproc)
    OMP_NUM_THREADS=$threads timeout --kill-after=10 "$limit" \
        "$PYTHON" -m coattn eval table --model "$4" --prompts "$PROMPTS/$5.jsonl.gz" --out "$OUT/$6.json" \
        --limit "$7" --budget "$8" --rows "$9" --batch "$BATCH" --dtype bfloat16 --kl 16 --hold 24GiB \
        --files "$OUT/calibrated_$(basename "$4")_$group" --turns "$OUT/$stage.lock" "${@:10}" \
        >"$OUT/$stage.$group.log" 2>&1
    echo "$stage, $group: $? after $(($(date +%s) - begun)) s of $limit, $(($(date +%s) - started)) s in all"
    grep -a "failed\|Error" "$OUT/$stage.$group.log" | cut -c1-300
}

stage() { # STAGE SECONDS MODEL PROMPTS LIMIT BUDGETS
    local group
    for group in gpu cpu auto pull; do rows "$1" $group "$2" "$3" "$4" "$4" "$5" "$6" "${ROWS[$group]}" & done
    if [ "$1" = main16 ] && ((PLAIN16)); then
        rows "$1" plain "$2" "$3" "$4" "${4}_plain" "$PLAIN16" 12.5% transformers --modes read &
    fi
    wait
}

one() {
    case $1 in
    main16) stage main16 "$TIME16" "$MODEL" qwen16 "$LIMIT16" "$BUDGETS16" ;;
    main32) stage main32 "$TIME32" "$MODEL" qwen32 "$LIMIT32" 12.5% ;;
    small8) stage small8 "$TIME8" "$SMOL" smol8 "$LIMIT8" 12.5% ;;
    merge)
        local there
        there=$(cd "$OUT" && ls -d qwen16 qwen16_plain qwen32 smol8 2>/dev/null)
        (cd "$OUT" && tar czf results.tar.gz $there ./*.log && ls -l results.tar.gz)
        (cd "$OUT" && for each in $there; do
            echo "$each: $(grep -l '"complete": true' "$each"/*/*.json | wc -l) rows of $(ls "$each"/*/*.json | wc -l) are whole"
        done)
        ;;
    *) echo "There is no stage $1: main16, main32, small8, merge." >&2 && exit 2 ;;
    esac
}

if (($# == 0)); then set -- main16 main32 small8 merge; fi
for name in "$@"; do one "$name"; done
