#!/usr/bin/env bash
# Makes the data of docs/results.md on a machine with a GPU, from one commit, in stages that go on where they stopped.
#
#   MODEL=model.gguf PROMPTS=prompts OUT=out scripts/results_gpu.sh [STAGE...]
#
# MODEL    the long-context model: a GGUF file, or a folder
# SMOL     the small model, for the stage at 8,192 tokens; default: smollm2
# PROMPTS  a folder with qwen16.jsonl.gz, qwen32.jsonl.gz and smol8.jsonl.gz (`coattn eval tasks make`)
# OUT      where results go; a stage that is run again does what is missing
# LIMIT    prompts of each task; default 4. BATCH: prompts at a time; default 24. PYTHON: default python3
#
# Stages, in order, with the seconds that each may take: main16 150, main32 210, small8 120, budgets16 120, extra32 90,
# merge 30. Each runs its rows one after the other, the best known first, so a stage that is cut off has whole rows.
# results.tar.gz in OUT holds what is to be kept.
set -uo pipefail
: "${MODEL:?the long-context model}" "${PROMPTS:?a folder of prompts}" "${OUT:?a folder for results}"
SMOL=${SMOL:-smollm2} LIMIT=${LIMIT:-4} BATCH=${BATCH:-24} PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"
started=$(date +%s)

# full first; then what a table of twelve rows needs, cheap ones first; rows that map and weigh most at the end
ROWS=full,scout,quest,snapkv,streaming,h2o,tova,duo,infinigen,pqcache,hcattention,auto,hgca
BUDGETS=full,scout,streaming,h2o,infinigen,hcattention,auto

stage() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 begun
    shift 2
    begun=$(date +%s)
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "$name: $? after $(($(date +%s) - begun)) s of $limit, $(($(date +%s) - started)) s in all"
    grep -a "failed" "$OUT/$name.log" | cut -c1-200
}

table() { # MODEL PROMPTS OUT ROWS BUDGET
    echo "$PYTHON" -m coattn eval table --model "$1" --prompts "$PROMPTS/$2" --out "$OUT/$3" --rows "$4" --budget "$5" \
        --limit "$LIMIT" --batch "$BATCH" --dtype bfloat16 --kl 16
}

one() {
    case $1 in
    main16) stage main16 150 $(table "$MODEL" qwen16.jsonl.gz qwen16.json $ROWS 12.5%) ;;
    main32) stage main32 210 $(table "$MODEL" qwen32.jsonl.gz qwen32.json $ROWS 12.5%) ;;
    small8) stage small8 120 $(table "$SMOL" smol8.jsonl.gz smol8.json $ROWS 12.5%) ;;
    budgets16) stage budgets16 120 $(table "$MODEL" qwen16.jsonl.gz qwen16.json $BUDGETS 6%,25%) ;;
    extra32) stage extra32 90 $(table "$MODEL" qwen32.jsonl.gz qwen32.json full,scout,auto 6%) ;;
    merge)
        stage merge 30 "$PYTHON" -m coattn eval table "$OUT"/qwen16 "$OUT"/qwen32 "$OUT"/smol8 --out "$OUT/table.json"
        tar czf "$OUT/results.tar.gz" --exclude=calibrated --exclude='*.log' -C "$OUT" \
            $(cd "$OUT" && ls -d qwen16 qwen32 smol8 ./*.json ./*.md ./*.png 2>/dev/null)
        ls -l "$OUT/results.tar.gz"
        ;;
    *) echo "There is no stage $1: main16, main32, small8, budgets16, extra32, merge." >&2 && exit 2 ;;
    esac
}

for name in "${@:-main16 main32 small8 budgets16 extra32 merge}"; do
    for each in $name; do one "$each"; done
done
