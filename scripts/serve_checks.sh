#!/usr/bin/env bash
# What `coattn serve` must hold, at full length; the tests have short versions. Each check starts its own server on 127.0.0.1.
#   scripts/serve_checks.sh                      all of them, in a folder of their own under results/local
#   scripts/serve_checks.sh clients forms crowd  some of them
#   scripts/serve_checks.sh day                  as many requests as an agent's in a day that asks every five seconds
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

clients() { # OpenAI's Python client in two major versions, Anthropic's, LangChain, LiteLLM, README's curl, and of npm OpenAI's and the AI SDK
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
    (cd "$OUT" && npm install --silent --no-save --no-audit --no-fund openai ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod >/dev/null)
    cp scripts/serve_client.mjs scripts/serve_ai_sdk.mjs "$OUT/"
    node "$OUT/serve_client.mjs" "$URL"
    node "$OUT/serve_ai_sdk.mjs" "$URL"
  else
    echo "npm: not here, so its clients were not tried"
  fi
  stop
  folder="$OUT/others"
  "$PYTHON" -m venv "$folder"
  "$PYTHON" -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' >"$(echo "$folder"/lib/python*/site-packages)/base.pth"
  "$folder/bin/python" -m pip install --quiet anthropic langchain-openai langchain-anthropic litellm mcp
  "$folder/bin/python" -m pytest -q tests/serve/test_other_clients.py
}

forms() { # required tools and strict schemas: all of 50 answers valid
  start --max-length 1024 --max-batch 4
  "$PYTHON" scripts/serve_load.py forms "$URL" --count "${COUNT:-50}"
  stop
}

crowd() { # many requests at once, of any length, with tools and schemas, some of which leave; memory is as before
  start --max-length 1024 --max-batch 16 --max-waiting 256 --no-access-log
  "$PYTHON" scripts/serve_load.py crowd "$URL" --count "${COUNT:-2000}" --at-once 64 --seed "${SEED:-0}" --pid "$server"
  stop
}

day() { # the same for 17,280 requests, of a very small model
  "$PYTHON" scripts/serve_small.py "$OUT/small"
  COUNT=${COUNT:-17280} MODEL="$OUT/small" crowd
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
