#!/usr/bin/env bash
# Measures what `auto` costs in quality on a machine with a GPU, beside other rows at equal GPU bytes, in stages that go
# on where they stopped. docs/methods/auto.md has the tables.
#
#   MODEL=model.gguf TEXTS=texts OUT=out scripts/auto_gpu.sh [STAGE...]
#
# MODEL    the long-context model: a GGUF file, or a folder
# SMOL     the small model, for the stage at 8,192 tokens; default: smollm2
# TEXTS    a folder with essays.txt and source.txt (scripts/make_texts.py); the third text is Python's help topics
# OUT      where results go; a stage that is run again does what is missing
# CORES    cores that one process gets, three run side by side; default 5
# LIMIT    seconds that a stage may take, ruler twice as many and speed four times; default 180
# ONLY     of the three texts; default: essays source topics
# PYTHON   default python3
#
# OWN      rows of the stage own; default: auto auto,code_bytes=32,hot=16384,now=2,far=1
# ASKED    rows of the stage ruler; default: full auto quest,budget=2050 scout,budget=1536
# PROMPTS  RULER's prompts at 16,384 tokens, for the stage that asks them (`coattn eval tasks make`)
# CASES    of scripts/auto_speed.py; default: its own. LAYERS: default 20
#
# Stages: kl16, kl30 (long-context model), kl8 (small model): every row on three texts. fine16: auto alone, in float32,
# where rounding adds nothing. audit16: qualities from 0.9 to 0.999 with every case measured. table: what there is, as
# text. Where they are named: own, auto alone at 16,384 and 30,720 tokens, and with an index of 12.5%, six
# processes side by side (90 s a row on an H200); ruler, auto beside full, quest and scout (90 s); speed; pack: all files but the
# pictures as auto.tar.gz.
set -uo pipefail
: "${MODEL:?the long-context model}" "${TEXTS:?a folder of texts}" "${OUT:?a folder for results}"
SMOL=${SMOL:-smollm2} CORES=${CORES:-5} LIMIT=${LIMIT:-180} PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT"

# auto as it is, its index 6.25% and then 12.5% of the KV, all of its pool attended; the others get the bytes that the
# first takes in all, with pool and window; an exact row shows what rounding alone does
LIKE=(--like auto)
ROWS=(auto,code_bytes=32,hot=16384,now=2,far=1 offload quest scout hgca hcattention)

shared() { # processes side by side share the GPU
    export CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps
    mkdir -p "$OUT/mps"
    nvidia-cuda-mps-control -d || true
}

alone() { # what is timed afterwards has the GPU for itself
    echo quit | nvidia-cuda-mps-control || true
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    rm -rf "$OUT/mps"
}

beside() { # NAME: prints a process that runs on its own cores
    local first=$((($1 * CORES) % $(nproc)))
    echo "taskset -c $first-$((first + CORES - 1 < $(nproc) ? first + CORES - 1 : $(nproc) - 1))"
}

sweep() { # NUMBER NAME MODEL TEXT PREFILL DECODE STRIDE LENGTH
    local text=()
    [ "$4" = topics ] || text=(--text "$TEXTS/$4.txt")
    timeout --signal=INT --kill-after=10 "$LIMIT" $(beside "$1") "$PYTHON" -m coattn eval sweep "${ROWS[@]}" "${LIKE[@]}" \
        --model "$3" "${text[@]}" --dtype "${DTYPE:-bfloat16}" --prefill "$5" --decode "$6" --stride "$7" \
        --length "$8" --out "$OUT/$2_$4.json" >"$OUT/$2_$4.log" 2>&1
}

three() { # NAME MODEL PREFILL DECODE STRIDE LENGTH
    local number=${FIRST:-0} text
    for text in ${ONLY:-essays source topics}; do
        sweep $number "$1" "$2" $text "${@:3}" &
        number=$((number + 1))
    done
    wait
}

one() {
    local begun name row
    begun=$(date +%s)
    case $1 in
    kl16) three kl16 "$MODEL" 16256 128 20000 70000 ;;
    kl30) three kl30 "$MODEL" 30592 128 36000 70000 ;;
    kl8) three kl8 "$SMOL" 8064 128 16000 62000 ;;
    fine16)
        (
            LIKE=() ROWS=(auto auto,code_bytes=32 auto,code_bytes=32,quality=0.99) DTYPE=float32
            three fine16 "$MODEL" 16256 128 20000 70000
        )
        ;;
    audit16)
        timeout --signal=INT --kill-after=10 "$LIMIT" "$PYTHON" -m coattn eval audit --model "$MODEL" --dtype bfloat16 \
            --text "$TEXTS/essays.txt" --prefill 16256 --decode 24 --stride 20000 --length 40000 \
            --out "$OUT/audit16_essays.json" >"$OUT/audit16.log" 2>&1
        ;;
    own)
        shared
        (
            LIKE=() CORES=2
            read -ra ROWS <<<"${OWN:-auto auto,code_bytes=32,hot=16384,now=2,far=1}"
            three own16 "$MODEL" 16128 256 17500 104000 &
            FIRST=3 ONLY="essays source" three own30 "$MODEL" 30464 256 31500 252000 &
            FIRST=5 ONLY=topics three own30 "$MODEL" 30464 256 6000 70000 & # windows overlap, not what is decoded
            wait
        )
        alone
        ;;
    ruler)
        shared
        read -ra ROWS <<<"${ASKED:-full auto quest,budget=2050 scout,budget=1536}"
        for row in "${ROWS[@]}"; do
            name=ruler_${row//[,=]/_}
            OMP_NUM_THREADS=4 timeout --kill-after=10 $((2 * LIMIT)) "$PYTHON" -m coattn eval table --model "$MODEL" \
                --out "$OUT/$name/ruler.json" --limit 8 --batch 24 --dtype bfloat16 --kl 16 --hold 14GiB \
                --modes fed --files "$OUT/calibrated" --turns "$OUT/ruler.lock" --prompts "${PROMPTS:?RULER\'s prompts}" \
                --rows "$row" >"$OUT/$name.log" 2>&1 &
        done
        wait
        alone
        ;;
    speed)
        read -ra cases <<<"${CASES:-}"
        timeout --kill-after=10 $((4 * LIMIT)) "$PYTHON" "$(dirname "$0")/auto_speed.py" --layers "${LAYERS:-20}" \
            --out "$OUT/speed.json" "${cases[@]}" 2>&1 | tee "$OUT/speed.log"
        ;;
    pack) tar --exclude='*.png' --exclude=auto.tar.gz -czf "$OUT/auto.tar.gz" -C "$OUT" . ;;
    table) "$PYTHON" "$(dirname "$0")/auto_table.py" "$OUT" ;;
    *)
        echo "There is no stage $1: kl16, kl30, kl8, fine16, audit16, own, ruler, speed, pack, table." >&2
        exit 2
        ;;
    esac
    echo "$1: $(($(date +%s) - begun)) s"
}

if (($# == 0)); then set -- kl16 kl30 kl8 fine16 audit16 table; fi
for name in "$@"; do one "$name"; done
