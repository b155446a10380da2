#!/bin/sh
# Prompts and requests on a machine with a GPU: scripts/prompt_checks.py, in this tree's environment where it has one.
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=$(command -v "$python" || command -v python3)
exec "$python" "$here/prompt_checks.py" "$@"
