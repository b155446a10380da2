#!/usr/bin/env bash
# Build the C++ core's test program under sanitizers and run it: address + undefined behaviour, then threads.
# Usage: scripts/test_native.sh [address,undefined | thread | none]...
set -euo pipefail
cd "$(dirname "$0")/.."

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
for sanitizer in "${@:-address,undefined thread}"; do
  for kind in $sanitizer; do
    dir=build/test-native-${kind//,/-}
    flag=$kind
    if [ "$kind" = none ]; then flag=""; fi
    cmake -S . -B "$dir" "${generator[@]}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCOATTN_PYTHON=OFF -DCOATTN_TESTS=ON \
      -DCOATTN_SANITIZE="$flag" >/dev/null
    cmake --build "$dir" --parallel "${JOBS:-$(nproc)}" --target coattn_native_test
    echo "== $kind"
    "$dir/coattn_native_test"
  done
done
