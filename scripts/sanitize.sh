#!/usr/bin/env bash
# Builds the native kernels with AddressSanitizer + UndefinedBehaviorSanitizer and with ThreadSanitizer, and runs a matrix of calls
# (tests/native/native_suite.cc) under each, for every instruction set of this machine.
#   scripts/sanitize.sh [build folder]
# Exits non-zero if a sanitizer reports anything.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
native=$root/kcp/ops/backends/native
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
compiler=${CXX:-g++}
python=${PYTHON:-python3}
sets="baseline"
if [[ $(uname -m) == x86_64 ]]; then
  grep -qw avx2 /proc/cpuinfo && sets="$sets avx2"
  grep -qw avx512bw /proc/cpuinfo && sets="$sets avx512"
fi

build() { # name, flags
  "$python" "$native/build.py" --compiler "$compiler" --output "$folder/$1/libkcp_native.so" --flags "$2 -g -O1 -fno-omit-frame-pointer" >/dev/null
  # shellcheck disable=SC2086
  "$compiler" $2 -g -O1 -std=c++17 "$root/tests/native/native_suite.cc" "$folder/$1/libkcp_native.so" -Wl,-rpath,"$folder/$1" -pthread \
    -o "$folder/$1/suite"
}
run() { # name
  for isa in $sets; do
    echo "== $1, $isa"
    KCP_ISA=$isa "$folder/$1/suite"
  done
}

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0
build address "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
run address
build thread "-fsanitize=thread"
run thread
echo "sanitizers: clean"
