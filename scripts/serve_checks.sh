#!/usr/bin/env bash
# What `coattn serve` must hold, at full length; the tests have short versions. Each check starts its own server on 127.0.0.1.
#   scripts/serve_checks.sh                      all of them, in a folder of their own under results/local
#   scripts/serve_checks.sh clients forms crowd  some of them
# Needs the extras serve, dev and checks; `npm` needs Node.js.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-results/local/serve_checks}
MODEL=${MODEL:-smollm2}
SCHEMATHESIS=${SCHEMATHESIS:-$PYTHON -m schemathesis.cli}
SECONDS_FUZZED=${SECONDS_FUZZED:-1200}
mkdir -p "$OUT"
server=""

start() { # options of coattn serve
  "$PYTHON" -m coattn serve --model "$MODEL" --dtype float32 --port 0 "$@" 2>"$OUT/server.log" &
  server=$!
  for _ in $(seq 600); do
    URL=$(sed -n 's/^listening on //p' "$OUT/server.log")
    if [ -n "$URL" ] && "$PYTHON" - "$URL" <<'PY'
import sys, urllib.request
try:
    sys.exit(urllib.request.urlopen(sys.argv[1] + "/ready", timeout=5).status != 200)
except OSError:
    sys.exit(1)
PY
    then export URL; return; fi
    sleep 0.5
  done
  echo "the server did not start: $OUT/server.log" >&2
  exit 1
}

stop() { # ends the server that this script started, and asks for exit code 0
  [ -z "$server" ] && return
  kill -TERM "$server"
  wait "$server" || { echo "the server ended with $?" >&2; exit 1; }
  server=""
  if grep -q Traceback "$OUT/server.log"; then echo "a traceback in $OUT/server.log" >&2; exit 1; fi
}
trap '[ -n "$server" ] && kill "$server" 2>/dev/null || true' EXIT

clients() { # OpenAI's Python client in two major versions, Anthropic's, README's curl, and OpenAI's client of npm
  start --max-length 1024
  for version in "openai>=2.8,<3" "openai>=3,<4"; do
    folder="$OUT/$(echo "$version" | tr -c 'a-z0-9\n' _)"
    "$PYTHON" -m pip install --quiet --no-deps --upgrade --target "$folder" "$version" httpx httpcore certifi distro jiter sniffio tqdm
    PYTHONPATH="$folder" "$PYTHON" scripts/serve_client.py "$URL"
  done
  folder="$OUT/anthropic"
  "$PYTHON" -m pip install --quiet --no-deps --upgrade --target "$folder" "anthropic>=2,<3" httpx2 httpcore2 distro docstring_parser jiter sniffio
  PYTHONPATH="$folder" "$PYTHON" scripts/serve_anthropic.py "$URL"
  command=$(sed -n 's/^`\(curl .*\)`$/\1/p' README.md)
  bash -c "${command/http:\/\/127.0.0.1:8000/$URL}" | tee "$OUT/curl.json" | grep -q '"object":"text_completion"'
  echo "README's curl: $(cut -c 1-60 "$OUT/curl.json") ..."
  if command -v npm >/dev/null; then
    (cd "$OUT" && npm install --silent --no-save --no-audit --no-fund openai >/dev/null)
    cp scripts/serve_client.mjs "$OUT/"
    node "$OUT/serve_client.mjs" "$URL"
  else
    echo "npm: not here, so its client was not tried"
  fi
  stop
}

forms() { # required tools and strict schemas: all of 50 answers valid
  start --max-length 1024 --max-batch 4
  "$PYTHON" scripts/serve_load.py forms "$URL" --count "${COUNT:-50}"
  stop
}

crowd() { # many requests at once, some of which leave
  start --max-length 512 --max-batch 8 --max-waiting 64
  "$PYTHON" scripts/serve_load.py crowd "$URL" --count "${COUNT:-500}" --at-once 32
  stop
}

fuzz() { # schemathesis over our own schema: no server error, no hang. A very small model answers more of its requests
  "$PYTHON" scripts/serve_small.py "$OUT/small"
  MODEL="$OUT/small" start --max-length 256 --max-batch 4
  PYTHONPATH=scripts SCHEMATHESIS_HOOKS=serve_fuzz $SCHEMATHESIS run "$URL/openapi.json" --checks not_a_server_error --phases coverage,fuzzing \
    --exclude-path /v1/coattn/live --max-time "$SECONDS_FUZZED" --request-timeout 60 --workers 1 --suppress-health-check all \
    2>&1 | tee "$OUT/fuzz.log" | tail -30
  [ "$(curl -s -o /dev/null -w '%{http_code}' "$URL/ready")" = 200 ]
  stop
}

for check in "${@:-clients forms crowd fuzz}"; do
  for one in $check; do
    echo "== $one"
    "$one"
  done
done
echo "all held"
