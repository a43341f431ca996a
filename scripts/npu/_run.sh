# Sourced by the scripts beside it: checks the arguments and starts kcp on N NPUs in PyNative mode, where Hyper-Parallel's kernels serve.
#
#   run_npu WORKERS LOCAL_WORKERS CONFIG [arguments of kcp train]

. "$(dirname "${BASH_SOURCE[0]}")/../_environment.sh"

run_npu() {
    local workers="$1" local_workers="$2" config="${3:-}"
    if [ -z "$config" ]; then
        echo "kcp: error: usage: $0 CONFIG [arguments of kcp train]" >&2
        exit 2
    fi
    shift 3
    local kcp="$environment/bin/kcp"
    [ -x "$kcp" ] || kcp=kcp
    "$kcp" validate "$config" --world-size "$workers"
    "$kcp" doctor --route "$config"
    exec "$kcp" train "$config" --worker-num "$workers" --local-worker-num "$local_workers" --mode pynative "$@"
}
