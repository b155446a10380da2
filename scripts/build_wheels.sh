#!/usr/bin/env bash
# Writes a source distribution and four wheels into OUT: for x86-64 and 64-bit ARM, one for Python 3.11 and one for 3.12
# and every later Python (stable ABI). Needs no Docker: Zig brings a cross compiler (Clang) and the symbols of glibc 2.28,
# Debian the headers of Python for both machines and an interpreter to ask. Runs on x86-64 Linux.
# Usage: scripts/build_wheels.sh OUT [MACHINE]...     machines: x86_64 aarch64
# Needs python3 with venv, cmake, ninja, curl, xz, dpkg-deb. What is fetched stays in build/wheels. DEBIAN_MIRROR is where
# Debian's packages are; left out, where apt gets them.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:?Usage: scripts/build_wheels.sh OUT [MACHINE]...}"
out=$(cd "$1" && pwd)
shift
machines=("$@")
if [ $# -eq 0 ]; then machines=(x86_64 aarch64); fi
work=$PWD/build/wheels
mkdir -p "$work"

if [ ! -e "$work/tools/.ready" ]; then
  "${PYTHON:-python3}" -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install --quiet "ziglang==0.17.0" "scikit-build-core>=0.11,<2" "nanobind>=2.7,<4" auditwheel wheel
  touch "$work/tools/.ready"
fi
tools=$("$work/tools/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep '/debian/$' | head -1 || true)}
mirror=${mirror%/}
[ -n "$mirror" ] || { echo "build_wheels: set DEBIAN_MIRROR to the address of an archive of Debian's packages." >&2; exit 2; }

fetch() { # SUITE DEBIAN_MACHINE FOLDER PACKAGE...: unpacks packages of Debian
  local suite=$1 machine=$2 into=$3 index=$work/$1-$2.txt name path
  shift 3
  mkdir -p "$into"
  [ -s "$index" ] || curl -fsS "$mirror/dists/$suite/main/binary-$machine/Packages.xz" | xz -dc |
    awk '$1 == "Package:" { name = $2 } $1 == "Filename:" { path = $2 } $1 == "SHA256:" { print name, path, $2 }' >"$index"
  for name in "$@"; do
    path=$(awk -v name="$name" '$1 == name { print $2, $3 }' "$index" | tail -1)
    curl -fsS -o "$work/package.deb" "$mirror/${path% *}"
    echo "${path#* } $work/package.deb" | sha256sum --check --quiet
    dpkg-deb -x "$work/package.deb" "$into"
  done
}

python_of() { # VERSION SUITE: the interpreter of a Debian release, with its headers for both machines
  local version=$1 root=$work/python$1 program
  program=$root/usr/bin/python$version
  [ -e "$root/.ready" ] && return
  fetch "$2" amd64 "$root" "python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib" \
    "libpython$version-dev" libc6 zlib1g libexpat1 libffi8
  fetch "$2" arm64 "$root/arm" "libpython$version-dev"
  # one folder for all, so that what does not include Python is compiled once for all of them: Zig keeps it
  mkdir -p "$work/include"
  cp -r "$root/usr/include/." "$root/arm/usr/include/." "$work/include/"
  # its C library may be newer than that of this machine, so it is started by its own loader
  mv "$program" "$program.real"
  cat >"$program" <<SCRIPT
#!/bin/sh
libraries=\$(find $root -maxdepth 3 -name x86_64-linux-gnu -path '*/lib/*' | paste -sd:)
exec "\$(find $root -name 'ld-linux-x86-64.so.2' -type f | head -1)" --argv0 $program --library-path "\$libraries" $program.real "\$@"
SCRIPT
  chmod +x "$program"
  touch "$root/.ready"
}

toolchain() { # MACHINE: compilers for it, and a file that tells CMake
  local folder=$work/$1 each
  mkdir -p "$folder"
  for each in cc c++; do
    printf '#!/bin/sh\nexec %s/ziglang/zig %s -target %s-linux-gnu.2.28 -fno-sanitize=undefined "$@"\n' \
      "$tools" $each "$1" >"$folder/$each"
  done
  printf '#!/bin/sh\nexec %s/ziglang/zig ar "$@"\n' "$tools" >"$folder/ar"
  printf '#!/bin/sh\nexec %s/ziglang/zig ranlib "$@"\n' "$tools" >"$folder/ranlib"
  chmod +x "$folder"/{cc,c++,ar,ranlib}
  cat >"$folder/toolchain.cmake" <<CMAKE
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $1)
set(CMAKE_C_COMPILER $folder/cc)
set(CMAKE_CXX_COMPILER $folder/c++)
set(CMAKE_AR $folder/ar CACHE FILEPATH "")
set(CMAKE_RANLIB $folder/ranlib CACHE FILEPATH "")
CMAKE
}

"$work/tools/bin/python" -c 'import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))' "$out"
python_of 3.11 bookworm
python_of 3.13 trixie
for machine in "${machines[@]}"; do
  toolchain "$machine"
  for version in 3.11 3.13; do
    # nanobind needs stdio.h, which the stable ABI of Python.h does not bring along
    rm -rf "$work/$machine-$version" # CMake keeps flags; what Zig has compiled, it keeps elsewhere
    suffix=.cpython-${version/./}-$machine-linux-gnu.so
    env _PYTHON_HOST_PLATFORM="linux-$machine" SETUPTOOLS_EXT_SUFFIX="$suffix" \
      CMAKE_TOOLCHAIN_FILE="$work/$machine/toolchain.cmake" CMAKE_GENERATOR=Ninja \
      CXXFLAGS="-isystem $work/include -include stdio.h" PYTHONPATH="$tools" \
      "$work/python$version/usr/bin/python$version" - "$out" "$work/$machine-$version" "$work/name" <<'PY'
import sys
from pathlib import Path

from scikit_build_core.build import build_wheel

out, folder, name = sys.argv[1:]
Path(name).write_text(build_wheel(out, {"build-dir": folder}))
PY
    name=$("$work/tools/bin/wheel" tags --remove --platform-tag "manylinux_2_28_$machine" "$out/$(cat "$work/name")" | tail -1)
    said=$("$work/tools/bin/auditwheel" show "$out/$name" | tr '\n' ' ')
    grep -qE 'consistent with the following platform tag: +"manylinux_2_([5-9]|1[0-9]|2[0-8])_' <<<"$said" || { echo "$said" >&2; exit 1; }
    echo "$name: $(stat -c %s "$out/$name") bytes"
  done
done
