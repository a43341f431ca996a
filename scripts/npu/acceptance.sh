#!/usr/bin/env bash
# The acceptance on a machine with NPUs: what is installed, the self-test, and 20 steps of training on 8 NPUs if there are that many.
#
#   scripts/npu/acceptance.sh [FOLDER]       results: FOLDER/doctor.txt, FOLDER/selftest.md, FOLDER/train/ (default: kcp-acceptance)
#
# Send FOLDER back. Not run on hardware (docs/ascend.md).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../_environment.sh"
kcp="$environment/bin/kcp"
[ -x "$kcp" ] || kcp=kcp
folder="${1:-kcp-acceptance}"
mkdir -p "$folder"
"$kcp" doctor | tee "$folder/doctor.txt"
code=0
"$kcp" selftest --device ascend --report "$folder/selftest.md" || code=$?
count=$(find /dev -maxdepth 1 -name 'davinci[0-9]*' 2>/dev/null | wc -l)
if [ "$count" -ge 8 ]; then
    "$(dirname "${BASH_SOURCE[0]}")/train_8.sh" "$(dirname "${BASH_SOURCE[0]}")/../../configs/kimi_linear_npu8.yaml" \
        --steps 20 --output-dir "$folder/train" || code=1
fi
exit "$code"
