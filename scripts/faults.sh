#!/usr/bin/env bash
# Exceptions in the middle of steps, and random histories of conversations, at length and in parallel, on a CPU; and
# `captured`, the exceptions in steps that a GPU replays, on a GPU.
# Usage: scripts/faults.sh OUT [matrix|fuzz|histories|captured ...]   (default: all but captured; OUT receives the logs)
#        FUZZ=5000 HISTORIES=2000 SEED=0 JOBS=16 scripts/faults.sh OUT
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/faults.sh OUT [matrix|fuzz|histories|captured ...]}
shift
parts=("${@:-matrix fuzz histories}")
mkdir -p "$out"
python=${PYTHON:-$(command -v python || command -v python3)}
jobs=${JOBS:-$(nproc)} seed=${SEED:-0}
export PYTHONPATH="src:.:${PYTHONPATH:-}" OMP_NUM_THREADS=1
[[ " ${parts[*]} " == *" captured "* ]] || export CUDA_VISIBLE_DEVICES=""
failed=0

# run NAME COMMAND...: in as many parts as there are jobs; the last line of each, and all that is wrong
run() {
  local name=$1 start=$SECONDS
  shift
  for ((i = 0; i < jobs; i++)); do
    "$python" -m "$@" --part "$i/$jobs" >"$out/$name.$i" 2>&1 &
  done
  wait
  cat "$out/$name".* >"$out/$name.log"
  rm -f "$out/$name".[0-9]*
  grep -v " with violations; \| histories from seed " "$out/$name.log" | sort | uniq | tail -40
  awk -v name="$name" -v jobs="$jobs" -v seconds="$((SECONDS - start))" '
    / cases with an exception/ { done++; cases += $1; none += substr($6, 2); for (i = 1; i < NF; i++) if ($(i + 1) == "with" && $(i + 2) == "violations;") bad += $i }
    / histories from seed/ { done++; cases += $1; for (i = 1; i < NF; i++) if ($(i + 1) == "wrong;") bad += $i }
    END { printf "%s: %d cases in %d of %d parts, %d steps that do not occur, %d bad, %d s\n", name, cases, done, jobs, none, bad, seconds; exit bad > 0 || done < jobs }
  ' "$out/$name.log" || failed=1
}

[[ " ${parts[*]} " == *" matrix "* ]] && run matrix tests.engine.faults --matrix --show
[[ " ${parts[*]} " == *" histories "* ]] && run histories tests.engine.histories --count "${HISTORIES:-2000}" --seed "$seed"
[[ " ${parts[*]} " == *" fuzz "* ]] && run fuzz tests.engine.faults --fuzz "${FUZZ:-5000}" --seed "$seed" --show
captured=(host runner launched between staged first decode session prefix remote)
[[ " ${parts[*]} " == *" captured "* ]] &&
  run captured tests.engine.faults --matrix --captured --show --phases ${PHASES:-${captured[@]}}
exit $failed
