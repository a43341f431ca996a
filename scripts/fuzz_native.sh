#!/usr/bin/env bash
# Coverage-guided fuzzing of the native kernels' entry points (tests/native/fuzz_entries.cc) under AddressSanitizer and
# UndefinedBehaviorSanitizer, the time shared by the instruction sets of this machine, and the line coverage of what it found.
#   scripts/fuzz_native.sh [seconds, default 600] [folder for the build and the corpus]
# Needs clang with libFuzzer and its llvm-profdata and llvm-cov (CLANG=clang++-14 LLVM=-14 name versioned ones).
# Exits non-zero on the first report; the input is then in the folder, to be replayed as FOLDER/fuzz INPUT.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
seconds=${1:-600}
folder=${2:-$(mktemp -d)}
compiler=${CLANG:-clang++}
suffix=${LLVM:-}
mkdir -p "$folder/corpus"
sets="baseline"
if [[ $(uname -m) == x86_64 ]]; then
  grep -qw avx2 /proc/cpuinfo && sets="avx2 $sets"
  grep -qw avx512bw /proc/cpuinfo && sets="avx512 $sets"
fi
flags="-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined -fprofile-instr-generate -fcoverage-mapping"
"${PYTHON:-python3}" "$root/kcp/ops/backends/native/build.py" --compiler "$compiler" --output "$folder/libkcp_native.so" \
  --flags "$flags -fsanitize=fuzzer-no-link -Wno-unknown-warning-option -Wno-pass-failed" >/dev/null
# shellcheck disable=SC2086
"$compiler" $flags -fsanitize=fuzzer -std=c++17 "$root/tests/native/fuzz_entries.cc" "$folder/libkcp_native.so" -Wl,-rpath,"$folder" \
  -pthread -o "$folder/fuzz"
export UBSAN_OPTIONS=print_stacktrace=1 LLVM_PROFILE_FILE="$folder/profile-%m-%p.profraw"
rm -f "$folder"/profile-*
count=$(wc -w <<<"$sets")
for isa in $sets; do
  echo "== $isa"
  KCP_ISA=$isa "$folder/fuzz" -max_total_time=$((seconds / count)) -max_len=512 -len_control=0 -timeout=60 -rss_limit_mb=4096 -seed=1 \
    -print_final_stats=1 -close_fd_mask=2 -artifact_prefix="$folder/" "$folder/corpus" >"$folder/$isa.log" 2>&1 ||
    { tail -60 "$folder/$isa.log"; exit 1; }
  grep -E 'inline 8-bit|DONE|number_of_executed|peak_rss' "$folder/$isa.log"
done
"llvm-profdata$suffix" merge -sparse "$folder"/profile-*.profraw -o "$folder/profile"
"llvm-cov$suffix" report "$folder/libkcp_native.so" -instr-profile="$folder/profile" | tail -1
echo "fuzzing: clean"
