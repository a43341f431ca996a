#!/usr/bin/env bash
# From a fresh clone to a trained model: installs kcp into .venv, then trains a small Kimi Delta Attention language model
# on the standard library's sources. Two processes share every sample of 512 tokens (context parallelism). CPU is enough.
#
#   bash scripts/quickstart.sh [arguments of kcp train]
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare_environment
cd "$repository"
"$environment/bin/kcp" train configs/tiny_cp2.yaml "$@"
