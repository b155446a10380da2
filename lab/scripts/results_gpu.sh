#!/usr/bin/env bash
# Makes the data of docs/results.md on a machine with a GPU, from one commit, in stages that go on where they stopped.
#
#   MODEL=model.gguf PROMPTS=prompts OUT=out lab/scripts/results_gpu.sh [STAGE...]
#
# MODEL    the long-context model: a GGUF file, or a folder
# SMOL     the small model, for stage small8; default: smollm2
# PROMPTS  a folder with qwen16.jsonl.gz, qwen32.jsonl.gz and smol8.jsonl.gz (`coattn-lab eval tasks make`)
# OUT      where results go; a stage that is run again does what is missing
# LIMIT    prompts of each task, for 16k, 32k, 8k, and for plain Transformers at 16k; default "3 2 3 2"
# TIMES    seconds that the stages main, small8, budgets16 and plain16 may take; default "280 80 60 90"
# BATCH    prompts at a time; default 24. PYTHON: default python3
#
# Stages: main, plain16, small8, merge; budgets16 where it is named. A stage runs its rows in three processes on one GPU:
# what the CPU attends to in one, so that it has all cores, what the GPU fetches in one, what lies in GPU memory in one;
# plain Transformers runs alone. Each reads the prompts for itself; in main those of 16k, then those of 32k. Five
# processes starved each other where the GPU was not shared by MPS (`nvidia-cuda-mps-control -d`); with it main took 400 s on an H200.
# Quality needs no idle GPU; `ms a step` does, so 16 steps of each row are timed while the other processes wait
# (--turns). Within a process rows run one after the other, those first that a table cannot do without; a stage that is
# cut off has whole rows: files that say "complete": true. Each file says where its seconds went ("phases").
# GPU memory: KV of all prompts in each process (192 MiB a prompt at 16k), and a batch of `full`.
# results.tar.gz in OUT holds what is to be kept; `scripts/make_results.py --take` makes the pages of it, unpacked.
set -uo pipefail
: "${MODEL:?the long-context model}" "${PROMPTS:?a folder of prompts}" "${OUT:?a folder for results}"
SMOL=${SMOL:-smollm2} BATCH=${BATCH:-24} PYTHON=${PYTHON:-python3}
read -r LIMIT16 LIMIT32 LIMIT8 PLAIN16 <<<"${LIMIT:-3 2 3 2}"
read -r TIME TIME8 TIME_BUDGETS TIME_PLAIN <<<"${TIMES:-280 80 60 90}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
started=$(date +%s)

declare -A ROWS=(
    [gpu]=full,quest,snapkv,h2o,tova,streaming,duo
    [cpu]=scout,hgca,hcattention
    [pull]="auto,infinigen,alpha=1000|5,pqcache"
)

rows() { # STAGE GROUP SECONDS MODEL NAME BUDGETS LIMIT ROWS ARGUMENTS...: one process of a stage
    local stage=$1 group=$2 limit=$3 begun threads=2 status
    begun=$(date +%s)
    [ "$group" = cpu ] && threads=$(nproc)
    OMP_NUM_THREADS=$threads timeout --kill-after=5 "$limit" \
        "$PYTHON" -m coattn_lab eval table --model "$4" --out "$OUT/$5.json" --budget "$6" --limit "$7" --rows "$8" \
        --batch "$BATCH" --dtype bfloat16 --kl 16 --hold 24GiB --files "$OUT/calibrated_$5_$group" \
        --turns "$OUT/$stage.lock" "${@:9}" >"$OUT/$stage.$group.log" 2>&1
    status=$?
    echo "$stage, $group: $status after $(($(date +%s) - begun)) s of $limit, $(($(date +%s) - started)) s in all"
    grep -a "failed\|Error" "$OUT/$stage.$group.log" | cut -c1-300
}

groups() { # STAGE SECONDS MODEL NAME BUDGETS LIMIT ARGUMENTS...
    local group
    for group in gpu cpu pull; do rows "$1" $group "$2" "$3" "$4" "$5" "$6" "${ROWS[$group]}" "${@:7}" & done
}

one() {
    local p16=(--prompts "$PROMPTS/qwen16.jsonl.gz") p32=(--prompts "$PROMPTS/qwen32.jsonl.gz")
    case $1 in
    main)
        groups main "$TIME" "$MODEL" qwen 12.5% "$LIMIT16,$LIMIT32" "${p16[@]}" "${p32[@]}"
        wait
        ;;
    plain16) rows plain16 plain "$TIME_PLAIN" "$MODEL" plain 12.5% "$PLAIN16" transformers --modes read "${p16[@]}" ;;
    small8)
        groups small8 "$TIME8" "$SMOL" smol 12.5% "$LIMIT8" --prompts "$PROMPTS/smol8.jsonl.gz"
        wait
        ;;
    budgets16)
        groups budgets16 "$TIME_BUDGETS" "$MODEL" qwen 25%,6% "$LIMIT16" "${p16[@]}"
        wait
        ;;
    merge)
        local there
        there=$(cd "$OUT" && ls -d qwen plain smol 2>/dev/null)
        (cd "$OUT" && tar czf results.tar.gz $there ./*.log && ls -l results.tar.gz)
        "$PYTHON" "$(dirname "$0")/make_results.py" --look "$OUT"
        ;;
    *) echo "There is no stage $1: main, plain16, small8, budgets16, merge." >&2 && exit 2 ;;
    esac
}

if (($# == 0)); then set -- main plain16 small8 merge; fi
for name in "$@"; do one "$name"; done
