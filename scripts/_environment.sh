# Sourced by the other scripts: makes .venv in the repository, or reuses it when it is current.
#
#   PYTHON     interpreter that makes it (default: python3.11)
#   KCP_VENV   where it is (default: .venv in the repository)
#
# It is current when setup.cfg, pyproject.toml, setup.py and the native kernels' sources are what they were when it was made. Needs nothing but a
# Python and a package index (pip's own settings decide which).

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="${KCP_VENV:-$repository/.venv}"

prepare_environment() {
    local python="${PYTHON:-python3.11}" stamp wanted
    stamp="$environment/.kcp-stamp"
    wanted="$(cd "$repository" && cat setup.cfg pyproject.toml setup.py kcp/ops/backends/native/*.{cc,h,py} | sha256sum | cut -c1-64)"
    if [ -x "$environment/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] &&
        "$environment/bin/python" -c 'import kcp' 2>/dev/null; then
        return 0
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        echo "kcp: error: PYTHON = $python: Python 3.10, 3.11 or 3.12 is needed (MindSpore 2.9 has no other wheels)" >&2
        return 2
    fi
    echo "kcp: installing into $environment (once; takes some minutes)"
    [ -x "$environment/bin/python" ] || "$python" -m venv "$environment" || return 1
    rm -f "$stamp"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -e "$repository[test]" || return 1
    echo "$wanted" >"$stamp"
}
