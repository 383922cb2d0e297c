"""Builds the CPU kernels; the rest is in pyproject.toml. Without a compiler the package installs all the same."""

import sys

from setuptools import Extension, setup

# No contraction into fused multiply-adds: pruned weights have to be equal bit for bit to those of PyTorch's operators.
FLAGS = ["/O2", "/std:c++17"] if sys.platform == "win32" else ["-O3", "-std=c++17", "-ffp-contract=off", "-pthread"]

setup(
    ext_modules=[
        Extension(
            "pareback.kernels._native",
            sources=["src/pareback/kernels/native.cpp"],
            depends=["src/pareback/kernels/native_sweep.h"],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ]
)
