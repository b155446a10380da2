#!/bin/sh
# Prompts and requests on a machine with a GPU, beside their floors and plain Transformers.
# Usage: scripts/prompt_checks.sh OUT [LINE ...]      all lines but `kernels` if none is named
#
# LINE       about  at most  what
# qwen        70 s    120 s  a prompt of 32k, Qwen3-8B: full, scout, hgca, hcattention in chunks of 8,192 and 2,048; Transformers
# llama       45 s     90 s  the same, Llama-3-8B: full, scout, Transformers, chunks of 8,192
# long        60 s    110 s  a prompt of 128k: full, Transformers
# capped      60 s    110 s  the same under 2 GiB of GPU memory: offload
# beside      55 s    110 s  8 sequences of 16k decode while a prompt of 64k is read
# requests   110 s    180 s  24 requests, 64 new tokens each, 12 GiB of GPU memory: full, scout, Transformers
# old         45 s     90 s  the same requests by `full` of an older tree: OLD=TARBALL
# driven     120 s    200 s  the same requests, 1,024 new tokens each, driven picks: full, scout
# kernels     30 s     90 s  TFLOP/s of each kernel
#
# The times are estimates for an H200, not measured. Each line prints one summary: every ratio, what it should be at
# most, and whether it is. A line that fails or takes too long says so; the others go on.
set -u
[ "${1:-}" = --help ] || [ "${1:-}" = -h ] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
out=${1:?usage: scripts/prompt_checks.sh OUT [LINE ...]}
shift
mkdir -p "$out"
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=$(command -v "$python" || command -v python3)
wanted=${*:-qwen llama long capped beside requests old driven}
bench="$python -m coattn bench"

line() { # NAME SECONDS COMMAND ...
  name=$1 most=$2
  shift 2
  case " $wanted " in *" $name "*) ;; *) return 0 ;; esac
  rm -f "$out/$name.json"
  begin=$(date +%s)
  timeout -k 5 "$most" "$@" >"$out/$name.log" 2>&1
  status=$?
  took=$(($(date +%s) - begin))
  case $status in
    0) "$python" "$here/prompt_table.py" "$out" "$name" "$took" ;;
    124 | 137) echo "$name: FAILED: not done in $most s" ;;
    *) echo "$name: FAILED with status $status after $took s: $(tail -n 2 "$out/$name.log" | tr '\n' ' ')" ;;
  esac
}

prefill="$bench prefill --chunk 8192 --floor"
# Mistral-7B has the same layers
requests="--shapes llama-3-8b --count 24 --prompts uniform:4096:30720 --gpu-kv 12GiB --no-floor"
line qwen 120 $bench prefill --floor --shapes qwen3-8b --tokens 32768 --chunk 8192,2048 --gpu-kv none \
  --methods transformers,scout,hgca,hcattention --out "$out/qwen.json"
line llama 90 $prefill --shapes llama-3-8b --tokens 32768 --gpu-kv none --methods transformers,scout --out "$out/llama.json"
line long 110 $prefill --shapes qwen3-8b --tokens 131072 --gpu-kv none --methods transformers --out "$out/long.json"
line capped 110 $bench prefill --chunk 8192 --shapes qwen3-8b --tokens 131072 --gpu-kv 2GiB --methods offload --out "$out/capped.json"
line beside 110 $bench beside --out "$out/beside.json"
line requests 180 $bench requests $requests --new fixed:64 --methods full,scout,transformers --out "$out/requests.json"
case " $wanted " in
  *" old "*)
    if [ -z "${OLD:-}" ]; then
      echo "old: left out, OLD=TARBALL was not given"
    else
      tree=$out/old
      rm -rf "$tree"
      mkdir -p "$tree"
      if tar -xf "$OLD" -C "$tree"; then
        src=$(dirname "$(find "$tree" -type d -name coattn -path '*src/coattn' | head -n 1)")
        # the compiled core is this tree's: `full` on a GPU does not attend with it
        [ -e "$src"/coattn/_native*.so ] || cp "$here"/../src/coattn/_native*.so "$src/coattn/" || true
        # an installed tree may come before any path, by a finder of its own
        start="import runpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)]; sys.path.insert(0, '$src')"
        line old 90 "$python" -c "$start; sys.argv[0] = 'coattn'; runpy.run_module('coattn', run_name='__main__')" \
          bench requests $requests --new fixed:64 --methods full --out "$out/old.json"
      else
        echo "old: FAILED to unpack $OLD"
      fi
    fi
    ;;
esac
line driven 200 $bench requests $requests --new fixed:1024 --max-batch 24 --change 0.124 --methods full,scout --out "$out/driven.json"
line kernels 90 $bench prompt-kernels --out "$out/kernels.json"
