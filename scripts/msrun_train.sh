#!/usr/bin/env bash
# Train CONFIG with WORKERS processes, on one machine or, with the arguments for several, on many:
#
#   scripts/msrun_train.sh configs/tiny_cp2.yaml 2
#   scripts/msrun_train.sh CONFIG 16 --local-worker-num 8 --master-addr ADDRESS --master-port 8118 --node-rank 0
#
# The same as `kcp train CONFIG --worker-num WORKERS ...`; see `kcp train --help`. Uses the repository's .venv if it is
# there, else the kcp on PATH.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "kcp: error: usage: scripts/msrun_train.sh CONFIG WORKERS [arguments of kcp train]" >&2
    exit 2
fi
config="$1"
workers="$2"
shift 2

. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
kcp="$environment/bin/kcp"
[ -x "$kcp" ] || kcp=kcp
exec "$kcp" train "$config" --worker-num "$workers" "$@"
