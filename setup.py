"""Builds the native CPU kernels with the package; where they can't be built, kcp installs without them (see ``kcp doctor``)."""

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = Path("kcp", "ops", "backends", "native")
_spec = importlib.util.spec_from_file_location("native_build", Path(__file__).resolve().parent / NATIVE / "build.py")
native_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native_build)


class BuildWithNative(build_py):
    """``build_py`` that also compiles the kernels: into the wheel, or next to the sources for an editable install."""

    def _native_target(self) -> Path:
        if getattr(self, "editable_mode", False):
            return native_build.SOURCES / native_build.LIBRARY
        return Path(self.build_lib) / NATIVE / native_build.LIBRARY

    def run(self):
        super().run()
        compiler = native_build.find_compiler()
        if compiler is None:
            self.warn("no C++ compiler found: installing without the native kernels")
            return
        try:
            native_build.build(self._native_target(), compiler)
        except RuntimeError as error:
            self.warn(f"the native kernels could not be built, installing without them: {error}")

    def get_outputs(self, include_bytecode=True):
        target = self._native_target()
        return super().get_outputs(include_bytecode) + ([str(target)] if target.exists() else [])


class PlatformDistribution(Distribution):
    """A distribution with machine code in it: its wheels are tied to a platform."""

    def has_ext_modules(self):
        return native_build.find_compiler() is not None


setup(cmdclass={"build_py": BuildWithNative}, distclass=PlatformDistribution)
