#!/usr/bin/env bash
# Train CONFIG on two machines of 8 NPUs each (data_parallel * context_parallel of CONFIG must be 16). On each machine, with its number:
#
#   scripts/npu/train_16.sh CONFIG NODE_RANK ADDRESS_OF_MACHINE_0 [PORT] [arguments of kcp train]
#
# NODE_RANK is 0 or 1; PORT (8118) must be free on machine 0. Every machine needs the same files at the same paths. Not run on hardware
# (docs/ascend.md).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
if [ $# -lt 3 ] || { [ "$2" != 0 ] && [ "$2" != 1 ]; }; then
    echo "kcp: error: usage: $0 CONFIG NODE_RANK(0|1) ADDRESS_OF_MACHINE_0 [PORT] [arguments of kcp train]" >&2
    exit 2
fi
config="$1" node="$2" address="$3" port=8118
shift 3
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    port="$1"
    shift
fi
run_npu 16 8 "$config" --node-rank "$node" --master-addr "$address" --master-port "$port" "$@"
