#!/usr/bin/env bash
# Build the C++ core's test program and run it: under sanitizers (address + undefined behaviour, then threads), or for
# 64-bit ARM under emulation.
# Usage: scripts/test_native.sh [address,undefined | thread | none | arm]...
#   ONLY=stress COATTN_STRESS=10 scripts/test_native.sh thread    tests whose names contain "stress", ten times as long
set -euo pipefail
cd "$(dirname "$0")/.."

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

build() { # name, cmake options...
  local dir=build/test-native-$1
  shift
  cmake -S . -B "$dir" "${generator[@]}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCOATTN_PYTHON=OFF -DCOATTN_TESTS=ON \
    "$@" >/dev/null
  cmake --build "$dir" --parallel "${JOBS:-$(nproc)}" --target coattn_native_test
}

arm() {
  local compiler=${ARM_CXX:-aarch64-linux-gnu-g++} emulator=""
  for name in qemu-aarch64 qemu-aarch64-static; do
    if command -v $name >/dev/null; then emulator=$name; fi
  done
  if ! command -v "$compiler" >/dev/null || [ -z "$emulator" ]; then
    echo "Skipped: there is no $compiler or no qemu-aarch64 (Debian: g++-aarch64-linux-gnu and qemu-user)." >&2
    return
  fi
  build arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_EXE_LINKER_FLAGS=-static
  # the first has no atomic instructions but load-exclusive and store-exclusive, the second has them
  for cpu in cortex-a57 max; do
    echo "== arm ($cpu)"
    "$emulator" -cpu $cpu build/test-native-arm/coattn_native_test ${ONLY:+"$ONLY"}
  done
}

if [ $# -eq 0 ]; then set -- address,undefined thread; fi
for kind in "$@"; do
  if [ "$kind" = arm ]; then
    arm
    continue
  fi
  name=${kind//,/-}
  if [ "$kind" = none ]; then kind=""; fi
  options=(-DCOATTN_SANITIZE="$kind")
  # instrumented vector code takes minutes to optimise; in which order threads touch it does not depend on its instructions
  if [ -n "$kind" ]; then options+=(-DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1"); fi
  if [ "$kind" = thread ]; then options+=(-DCOATTN_GENERIC=ON); fi
  build "$name" "${options[@]}"
  echo "== $name"
  "build/test-native-$name/coattn_native_test" ${ONLY:+"$ONLY"}
done
