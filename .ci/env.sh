#!/usr/bin/env bash
# Makes or finds the environments and builds that the Makefile uses. They are outside the checkout and
# shared by all checkouts. Prints one path to stdout, and progress to stderr.
#
#   .ci/env.sh core|vllm|sglang     the python of an environment with this checkout's kt-moe
#   .ci/env.sh wheel [VERSION]      this checkout's wheel for a Python version (default: core's)
#   .ci/env.sh cmake [VERSION]      the build folder of this wheel, including objects
#   .ci/env.sh emulation [VERSION]  the file of the test-only module _C_emul
#   .ci/env.sh sanitized [VERSION]  the same, built with AddressSanitizer and UBSan
#   .ci/env.sh python VERSION       a python of that version on this machine
#   .ci/env.sh prune                removes environments that this checkout's pins no longer name
#
# KT_ENVS sets another place for them. Exit code 3: no suitable Python, or no libsimde-dev.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
envs=${KT_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/kt-moe/envs}
readonly root envs

say() { echo "[env] $*" >&2; }
die() {
  echo "[env] error: $1" >&2
  exit "${2:-1}"
}

# ---- Python

# Prints the full path of a python of this version (3.11, ...) that can create environments.
find_python() {
  local version=$1 candidate
  local probe='import sys, venv, ensurepip
assert "%d.%d" % sys.version_info[:2] == sys.argv[1]
print(sys.executable)'
  for candidate in "python$version" python3 "$(pyenv_python "$version")"; do
    [ -n "$candidate" ] && "$candidate" -c "$probe" "$version" 2>/dev/null && return 0
  done
  return 1
}

# A version manager may have a version that is not on PATH.
pyenv_python() {
  local name
  command -v pyenv >/dev/null || return 0
  name=$(pyenv versions --bare 2>/dev/null | grep -x "$1\.[0-9]*" | tail -n 1) || return 0
  echo "$(pyenv prefix "$name")/bin/python"
}

# 3.11 if there is one (the engines need it), otherwise a later version that kt-moe supports.
default_version() {
  local version
  for version in 3.11 3.12 3.13; do
    find_python "$version" >/dev/null && echo "$version" && return 0
  done
  die "no Python 3.11, 3.12 or 3.13 with the venv module found (Debian: python3 python3-venv python3-dev)" 3
}

# ---- Environments

hash_of() { sha256sum | cut -c1-12; }

# env_path NAME PYTHON: the folder, another one for other pins, another recipe or another Python.
env_path() {
  local key
  key=$({ cat "$root/constraints.txt" "$root/.ci/envs/$1.sh" && "$2" -VV; } | hash_of)
  echo "$envs/$1-$key"
}

# Opens and locks file descriptor 9 until the calling subshell ends.
lock() {
  mkdir -p "$(dirname "$1")"
  exec 9>"$1"
  flock -n 9 && return 0
  say "waiting for another make that holds $1"
  flock 9
}

# make_env NAME VERSION: prints the folder. The stamp .complete is written last. An environment without
# it was interrupted and is created again (a venv cannot be built elsewhere and renamed).
make_env() {
  local name=$1 python env
  python=$(find_python "$2") || die "Python $2 with the venv module is needed for '$name' and was not \
found (Debian: python$2 python$2-venv python$2-dev)" 3
  env=$(env_path "$name" "$python")
  (
    lock "$env.lock"
    SECONDS=0
    if [ -e "$env/.complete" ] && "$env/bin/python" -c '' 2>/dev/null; then exit 0; fi
    rm -rf "$env"
    say "$name: creating $env ($("$python" -V), $(sed -n 's/^# Size: //p' "$root/.ci/envs/$name.sh"))"
    "$python" -m venv "$env"
    run_recipe "$name" "$env"
    touch "$env/.complete"
    say "$name: ready after $SECONDS s"
  )
  echo "$env"
}

# Runs .ci/envs/NAME.sh with its output in install.log. Prints a line every half minute, and the end of
# the log if it fails.
run_recipe() {
  local name=$1 env=$2 log=$2/install.log pid
  (
    pip() { "$env/bin/python" -m pip --disable-pip-version-check "$@"; }
    install() { pip install -q --no-input -c "$root/constraints.txt" "$@"; }
    python() { "$env/bin/python" "$@"; }
    # shellcheck disable=SC1090
    source "$root/.ci/envs/$name.sh"
  ) >"$log" 2>&1 9>&- &
  pid=$!
  trap 'kill "$pid" 2>/dev/null' EXIT
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    [ $((SECONDS % 30)) -ne 0 ] ||
      say "$name: installing, $SECONDS s, $(du -sh "$env" 2>/dev/null | cut -f1) so far"
  done
  trap - EXIT
  wait "$pid" && return 0
  tail -n 25 "$log" >&2
  die "$name: could not be installed; whole log: $log"
}

# ---- Builds of this checkout

package_files() {
  cd "$root"
  find pyproject.toml README.md LICENSE kernels src plugin_entrypoints -type f \
    -not -path '*/__pycache__/*' -not -name '*.so' | LC_ALL=C sort
}

# The names are relative to the root, from wherever this script is called.
source_hash() { (cd "$root" && package_files | tr '\n' '\0' | xargs -0 sha256sum | hash_of); }

# Mirrors the package's files to a folder that is the same for all checkouts, and touches only files that
# differ, so that unchanged kernels are not compiled again in a fresh clone.
mirror_sources() {
  local target=$1 file
  mkdir -p "$target"
  package_files | while IFS= read -r file; do
    cmp -s "$root/$file" "$target/$file" || install -D -m 644 "$root/$file" "$target/$file"
  done
  (cd "$target" && find . -type f | sed 's|^\./||' | LC_ALL=C sort) |
    LC_ALL=C comm -23 - <(package_files) | (cd "$target" && xargs -r -d '\n' rm -f)
}

require_compiler() {
  command -v "${CXX:-c++}" >/dev/null ||
    die "no C++ compiler found (${CXX:-c++}); one with C++20 is needed (Debian: g++)"
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    die "the C headers of $("$1" -V) are missing (Debian: python3-dev)" 3
}

# build_wheel VERSION: prints the wheel's path. Builds nothing if this exact source was built before.
build_wheel() {
  local env hash folder
  env=$(make_env build "$1")
  hash=$(source_hash)
  folder=$env/wheels/$hash
  (
    lock "$env.lock"
    compgen -G "$folder/*.whl" >/dev/null && exit 0
    require_compiler "$env/bin/python"
    SECONDS=0
    say "kt-moe: building the wheel for Python $1"
    mirror_sources "$env/source"
    rm -rf "$folder.part"
    if ! PATH=$env/bin:$PATH pip wheel -q --no-deps --no-build-isolation --wheel-dir "$folder.part" \
      -C build-dir="$env/cmake" "$env/source" >"$env/wheel.log" 2>&1 9>&-; then
      tail -n 40 "$env/wheel.log" >&2
      die "kt-moe: the wheel did not build; whole log: $env/wheel.log"
    fi
    find "$env/wheels" -mindepth 1 -maxdepth 1 -mtime +7 -exec rm -rf {} +
    mv "$folder.part" "$folder"
    say "kt-moe: built after $SECONDS s"
  )
  echo "$folder"/*.whl
}

# Installs this checkout's wheel into an environment, unless this very wheel is installed.
install_wheel() {
  local env=$1 wheel=$2 hash
  hash=$(basename "$(dirname "$wheel")")
  (
    lock "$env.lock"
    [ "$(cat "$env/.kt-moe" 2>/dev/null)" != "$hash" ] || exit 0
    rm -f "$env/.kt-moe"
    "$env/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-index \
      --force-reinstall "$wheel" >&2 9>&-
    echo "$hash" >"$env/.kt-moe"
    say "kt-moe: installed into $env"
  )
}

# build_emulation VERSION FOLDER [CMAKE ARGUMENT...]
build_emulation() {
  local env version=$1 folder=$2
  shift 2
  echo '#include <simde/x86/avx512.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 ||
    die "the emulation of AVX-512 and AMX is not built: it needs SIMDe's headers (Debian: libsimde-dev)" 3
  build_wheel "$version" >/dev/null
  env=$(make_env build "$version")
  (
    lock "$env.lock"
    mirror_sources "$env/source"
    say "kt-moe: building the emulated kernels ($folder)"
    if ! {
      PATH=$env/bin:$PATH cmake -S "$env/source/kernels" -B "$env/$folder" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DKT_EMULATE=ON -DPython_EXECUTABLE="$env/bin/python" "$@" &&
        PATH=$env/bin:$PATH cmake --build "$env/$folder"
    } >"$env/$folder.log" 2>&1 9>&-; then
      tail -n 40 "$env/$folder.log" >&2
      die "kt-moe: the emulated kernels did not build; whole log: $env/$folder.log"
    fi
  )
  echo "$env/$folder"/_C_emul*.so
}

cmake_folder() {
  local env
  build_wheel "$1" >/dev/null
  env=$(make_env build "$1")
  echo "$env/cmake"
}

# ----

installed() {
  local env wheel
  env=$(make_env "$1" "$2")
  wheel=$(build_wheel "$2")
  install_wheel "$env" "$wheel"
  echo "$env/bin/python"
}

prune() {
  local name version python folder keep=" "
  for name in build core vllm sglang; do
    for version in 3.11 3.12 3.13; do
      python=$(find_python "$version") && keep+="$(env_path "$name" "$python") "
    done
  done
  for folder in "$envs"/*/; do
    folder=${folder%/}
    [[ $keep != *" $folder "* && -d $folder ]] || continue
    say "removing $folder"
    (lock "$folder.lock" && rm -rf "$folder" "$folder.lock")
  done
}

case "${1:-}" in
  core | emulation | sanitized | wheel | cmake)
    version=${2:-}
    [ -n "$version" ] || version=$(default_version)
    case $1 in
      core) installed core "$version" ;;
      emulation) build_emulation "$version" emulation ;;
      # One table of each kind: vector kernels with 256 and 512 bits, and tiles. Not -O3: with both
      # sanitizers, GCC 12 then uses the wrong vector's scale in AVX2's GroupBlock<Int4Scales>::run<2>.
      sanitized)
        build_emulation "$version" sanitized "-DKT_ISA=avx2;avx512_vnni;amx" \
          "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" \
          "-DCMAKE_CXX_FLAGS=-fsanitize=address,undefined -fno-sanitize-recover=undefined"
        ;;
      wheel) build_wheel "$version" ;;
      cmake) cmake_folder "$version" ;;
    esac
    ;;
  vllm | sglang) installed "$1" 3.11 ;;
  python) find_python "${2:?a version such as 3.12}" || die "no Python $2 with the venv module found" 3 ;;
  prune) prune ;;
  *)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
