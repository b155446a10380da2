#!/usr/bin/env bash
# Build coattn._native into src/coattn/ with plain cmake: no registry, no wheel.
# Usage: scripts/build_native.sh   PYTHON=python3.12 BUILD_TYPE=Debug BUILD_DIR=build/debug scripts/build_native.sh
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$(command -v python || command -v python3)}
build_type=${BUILD_TYPE:-Release}
tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
build_dir=${BUILD_DIR:-build/native-$tag-${build_type,,}}
if ! nanobind_dir=$("$python" -m nanobind --cmake_dir); then
  echo "build_native: $python has no nanobind; install it (pip install nanobind) or set PYTHON." >&2
  exit 1
fi
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

cmake -S . -B "$build_dir" "${generator[@]}" -DCMAKE_BUILD_TYPE="$build_type" \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" -Dnanobind_DIR="$nanobind_dir"
cmake --build "$build_dir" --parallel "${JOBS:-$(nproc)}" --target _native
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
rm -f "src/coattn/_native$suffix"
cp "$build_dir/_native$suffix" src/coattn/
echo "built src/coattn/_native$suffix"
