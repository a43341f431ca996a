#!/usr/bin/env bash
# Runs the tests in .venv (made when it is missing): the fast ones, with CI=true the slower ones too
# (tests/conftest.py decides).
#
#   bash scripts/test.sh [arguments of pytest]
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare_environment
cd "$repository"
exec "$environment/bin/python" -m pytest -q "$@"
