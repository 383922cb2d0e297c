"""Builds the CPU kernels; the rest is in pyproject.toml. Without a compiler the package installs all the same.

The libraries are called through ctypes and know nothing of Python: one wheel serves every version of it.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Hidden: gcc would make the two libraries share what only looks like each one's own, such as their threads.
FLAGS = ["/O2", "/std:c++17"] if sys.platform == "win32" else ["-O3", "-std=c++17", "-pthread", "-fvisibility=hidden"]
# No contraction into fused multiply-adds: pruned weights have to be equal bit for bit to those of PyTorch's operators.
AS_WRITTEN = [] if sys.platform == "win32" else ["-ffp-contract=off"]
FASTEST = [] if sys.platform == "win32" else ["-ffp-contract=fast", "-fno-math-errno"]
NATIVE = ("activations", "attention", "group_norm", "lanes", "linear", "packing", "team")
SHARED = ["src/pareback/kernels/isa.h", "src/pareback/kernels/pool.h"]


def library(name: str, source: str, headers: list[str], flags: list[str]) -> Extension:
    return Extension(
        f"pareback.{name}",
        sources=[source],
        depends=headers,
        extra_compile_args=FLAGS + flags,
        language="c++",
        optional=True,
    )


class PlainLibraries(build_ext):
    """Libraries without a version of Python in their names."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + (".pyd" if sys.platform == "win32" else ".so")


class AnyPython(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": PlainLibraries, "bdist_wheel": AnyPython},
    ext_modules=[
        library(
            "kernels._native",
            "src/pareback/kernels/native.cpp",
            [*(f"src/pareback/kernels/{name}.h" for name in ("native_sweep", "control", "gaps")), *SHARED],
            AS_WRITTEN,
        ),
        library(
            "runtime.native._engine",
            "src/pareback/runtime/native/engine.cpp",
            [f"src/pareback/runtime/native/{name}.h" for name in NATIVE] + SHARED,
            FASTEST,
        ),
    ],
)
