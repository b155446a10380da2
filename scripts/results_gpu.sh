#!/usr/bin/env bash
# Makes the data of docs/results.md on a machine with a GPU, from one commit, in stages that go on where they stopped.
#
#   MODEL=model.gguf PROMPTS=prompts OUT=out scripts/results_gpu.sh [STAGE...]
#
# MODEL    the long-context model: a GGUF file, or a folder
# SMOL     the small model, for the stage at 8,192 tokens; default: smollm2
# PROMPTS  a folder with qwen16.jsonl.gz, qwen32.jsonl.gz and smol8.jsonl.gz (`coattn eval tasks make`)
# OUT      where results go; a stage that is run again does what is missing
# LIMIT    prompts of each task: three numbers, for 16k, 32k and 8k; default "4 3 2". BATCH: prompts at a time; default 24
# PYTHON   default python3
#
# Stages, in order, with the seconds that each may take: main16 260, main32 230, small8 120, budgets16 85, merge 20.
# Rows run one after the other, those that a table cannot do without first, so a stage that is cut off has whole rows;
# run it again for the others. What takes the time, as measured on an H200 at 16,384 tokens: 10 s of imports a stage;
# Triton's compiler, some seconds for each row while its cache is empty; giving a prompt's KV to a row, 5 ms (full),
# 28 ms (scout), 190 ms (auto, which fits its sketch). DRAM is mapped once for all rows of a length. results.tar.gz in
# OUT holds what is to be kept.
set -uo pipefail
: "${MODEL:?the long-context model}" "${PROMPTS:?a folder of prompts}" "${OUT:?a folder for results}"
SMOL=${SMOL:-smollm2} BATCH=${BATCH:-24} PYTHON=${PYTHON:-python3}
read -r LIMIT16 LIMIT32 LIMIT8 <<<"${LIMIT:-4 3 2}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
started=$(date +%s)

ROWS=full,scout,auto,quest,snapkv,streaming,h2o,tova,duo,infinigen,hcattention,hgca,pqcache
BUDGETS=full,scout,streaming,h2o,infinigen

stage() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 begun
    shift 2
    begun=$(date +%s)
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "$name: $? after $(($(date +%s) - begun)) s of $limit, $(($(date +%s) - started)) s in all"
    grep -a "failed" "$OUT/$name.log" | cut -c1-200
}

table() { # MODEL PROMPTS NAME LIMIT ROWS BUDGET
    echo "$PYTHON" -m coattn eval table --model "$1" --prompts "$PROMPTS/$2.jsonl.gz" --out "$OUT/$3.json" --limit "$4" \
        --rows "$5" --budget "$6" --batch "$BATCH" --dtype bfloat16 --kl 16 --files "$OUT/calibrated_$(basename "$1")"
}

one() {
    case $1 in
    main16) stage main16 260 $(table "$MODEL" qwen16 qwen16 "$LIMIT16" $ROWS 12.5%) ;;
    main32) stage main32 230 $(table "$MODEL" qwen32 qwen32 "$LIMIT32" $ROWS 12.5%) ;;
    small8) stage small8 120 $(table "$SMOL" smol8 smol8 "$LIMIT8" $ROWS 12.5%) ;;
    budgets16) stage budgets16 85 $(table "$MODEL" qwen16 qwen16 "$LIMIT16" $BUDGETS 6%,25%) ;;
    merge)
        local there
        there=$(cd "$OUT" && ls -d qwen16 qwen32 smol8 2>/dev/null)
        stage merge 20 "$PYTHON" -m coattn eval table $(printf "$OUT/%s " $there) --out "$OUT/table.json"
        (cd "$OUT" && tar czf results.tar.gz $there ./*.json ./*.md ./*.png && ls -l results.tar.gz)
        ;;
    *) echo "There is no stage $1: main16, main32, small8, budgets16, merge." >&2 && exit 2 ;;
    esac
}

if (($# == 0)); then set -- main16 main32 small8 budgets16 merge; fi
for name in "$@"; do one "$name"; done
