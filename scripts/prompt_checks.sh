#!/bin/sh
# Prompts and requests on a machine with a GPU, beside their floors and plain Transformers. About six minutes.
# Usage: scripts/prompt_checks.sh OUT [LINE ...]
# LINE: kernels qwen llama long capped beside requests old. All of them if none is named. OLD=TARBALL: an older tree, whose `full` serves
# the same requests. A line that fails says so; the others go on. The table at the end reads what is in OUT.
set -u
out=${1:?usage: scripts/prompt_checks.sh OUT [LINE ...]}
shift
mkdir -p "$out"
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
wanted=${*:-qwen llama long capped beside requests old kernels}
bench="$python -m coattn bench"

line() { # NAME SECONDS COMMAND ...
  name=$1 most=$2
  shift 2
  case " $wanted " in *" $name "*) ;; *) return 0 ;; esac
  rm -f "$out/$name.json"
  begin=$(date +%s)
  if timeout "$most" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: $(($(date +%s) - begin)) s"
  else
    echo "$name: FAILED with status $? after $(($(date +%s) - begin)) s"
    tail -n 5 "$out/$name.log"
  fi
}

# Mistral-7B has the same layers
requests="--shapes llama-3-8b --count 24 --prompts uniform:4096:30720 --new fixed:64 --gpu-kv 12GiB --no-floor"
rows=transformers,scout,hgca,hcattention
line qwen 150 $bench prefill --shapes qwen3-8b --tokens 32768 --chunk 8192 --gpu-kv none --floor --methods $rows --out "$out/qwen.json"
line llama 150 $bench prefill --shapes llama-3-8b --tokens 32768 --chunk 8192 --gpu-kv none --floor --methods $rows --out "$out/llama.json"
line long 150 $bench prefill --shapes qwen3-8b --tokens 131072 --chunk 8192 --gpu-kv none --floor --methods transformers --out "$out/long.json"
line capped 150 $bench prefill --shapes qwen3-8b --tokens 131072 --chunk 8192 --gpu-kv 2GiB --methods offload --out "$out/capped.json"
line beside 150 $bench beside --out "$out/beside.json"
line requests 240 $bench requests $requests --methods full,scout,transformers --out "$out/requests.json"
if [ -n "${OLD:-}" ]; then
  tree=$out/old
  rm -rf "$tree"
  mkdir -p "$tree"
  if tar -xf "$OLD" -C "$tree"; then
    src=$(dirname "$(find "$tree" -type d -name coattn -path '*src/coattn' | head -n 1)")
    # the compiled core is this tree's: `full` on a GPU does not attend with it
    [ -e "$src"/coattn/_native*.so ] || cp "$here"/../src/coattn/_native*.so "$src/coattn/" || true
    # an installed tree may come before any path, by a finder of its own
    start="import runpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)]; sys.path.insert(0, '$src')"
    line old 200 "$python" -c "$start; sys.argv[0] = 'coattn'; runpy.run_module('coattn', run_name='__main__')" \
      bench requests $requests --methods full --out "$out/old.json"
  else
    echo "old: FAILED to unpack $OLD"
  fi
fi
line kernels 90 $bench prompt-kernels --out "$out/kernels.json"
"$python" "$here/prompt_table.py" "$out"
