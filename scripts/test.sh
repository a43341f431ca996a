#!/usr/bin/env bash
# Runs the tests in .venv (made when it is missing): the fast ones, with CI=true the slower ones too.
#
#   bash scripts/test.sh [arguments of pytest]
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare_environment
cd "$repository"
marks="not ci and not once"
[ "${CI:-}" = "true" ] && marks="not once"
exec "$environment/bin/python" -m pytest -q -m "$marks" "$@"
