#!/usr/bin/env bash
# Cross-compiles the native kernels for aarch64 and runs a matrix of calls (tests/native/native_suite.cc) under qemu.
#   scripts/cross_aarch64.sh [build folder]
# Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user); exits 77 where they are missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
compiler=${CROSS_CXX:-aarch64-linux-gnu-g++}
emulator=${QEMU:-qemu-aarch64}
for tool in "$compiler" "$emulator"; do
  command -v "$tool" >/dev/null || { echo "$tool not found: skipped"; exit 77; }
done
mkdir -p "$folder"
"${PYTHON:-python3}" "$root/kcp/ops/backends/native/build.py" --compiler "$compiler" --machine aarch64 --output "$folder/libkcp_native.so"
"$compiler" -O1 -std=c++17 "$root/tests/native/native_suite.cc" "$folder/libkcp_native.so" -Wl,-rpath,"$folder" -pthread -o "$folder/suite"
KCP_SUITE_NO_FORK=1 "$emulator" -L "${AARCH64_ROOT:-/usr/aarch64-linux-gnu}" "$folder/suite"
