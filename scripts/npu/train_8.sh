#!/usr/bin/env bash
# Train CONFIG on the 8 NPUs of this machine (data_parallel * context_parallel of CONFIG must be 8):
#
#   scripts/npu/train_8.sh CONFIG [arguments of kcp train]
#
# msrun starts the workers and binds them to the cores near their NPU. Not run on hardware (docs/ascend.md).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
config="${1:-}"
[ $# -gt 0 ] && shift
run_npu 8 8 "$config" "$@"
