"""Compiles the native kernels into one shared library.

``python kcp/ops/backends/native/build.py`` builds next to the sources (a source checkout); ``setup.py`` uses :func:`build` for installs.
Needs a C++17 compiler (``CXX``, else g++, c++ or clang++) and nothing else. The library holds one copy of the kernels for each
instruction set and picks one when it runs, so it is not tied to the machine that built it.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libkcp_native.so"
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx2", "-mfma"]
# namespace, floats in a vector, flags
INSTRUCTION_SETS = {
    "x86_64": [("kcp_avx512", 16, AVX512), ("kcp_avx2", 8, ["-mavx2", "-mfma"]), ("kcp_baseline", 4, [])],
    "aarch64": [("kcp_baseline", 4, [])],
}


def find_compiler() -> str | None:
    """Path of the C++ compiler, or None."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    return None


def build(output: Path, compiler: str, machine: str | None = None, extra: list[str] | None = None) -> None:
    """Compile and link ``output``.

    Args:
        output: The shared library to write.
        compiler: Command of the C++ compiler.
        machine: ``"x86_64"`` or ``"aarch64"``; the running machine by default.
        extra: Further flags for every compiler call (sanitizers, cross compilers).

    Raises:
        RuntimeError: the machine is not supported, or the compiler failed; holds the compiler's message.
    """
    machine = machine or platform.machine()
    if machine not in INSTRUCTION_SETS:
        raise RuntimeError(f"no native kernels for {machine}; supported: {', '.join(INSTRUCTION_SETS)}")
    command = compiler.split()
    extra = extra or []

    def run(arguments):
        done = subprocess.run([*command, *extra, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(done.args)}\n{done.stderr[-4000:]}")

    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for namespace, lanes, flags in INSTRUCTION_SETS[machine]:
            defines = [f"-DKCP_ISA={namespace}", f"-DKCP_LANES={lanes}"]
            jobs.append(([*FLAGS, *defines, *flags, "-c", str(SOURCES / "kernels.cc")], f"{scratch}/{namespace}.o"))
        for source in sorted(SOURCES.glob("*.cc")):
            if source.name != "kernels.cc":
                jobs.append(([*FLAGS, "-c", str(source)], f"{scratch}/{source.stem}.o"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: run([*job[0], "-o", job[1]]), jobs))
        output.parent.mkdir(parents=True, exist_ok=True)
        linked = f"{scratch}/{LIBRARY}"
        run(["-shared", "-o", linked, *(o for _, o in jobs), "-pthread"])
        # a new file in place of the old one: a process that has the old one loaded keeps it
        shutil.copy(linked, f"{output}.new")
        os.replace(f"{output}.new", output)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native kernels of kcp.")
    parser.add_argument("--output", type=Path, default=SOURCES / LIBRARY)
    parser.add_argument("--compiler", default=find_compiler(), help="C++ compiler; may be a cross compiler")
    parser.add_argument("--machine", choices=sorted(INSTRUCTION_SETS), default=None)
    parser.add_argument("--flags", default="", help="further compiler flags, separated by spaces")
    args = parser.parse_args()
    if args.compiler is None:
        print("no C++ compiler found (CXX, g++, c++, clang++)", file=sys.stderr)
        return 1
    try:
        build(args.output, args.compiler, args.machine, args.flags.split())
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
