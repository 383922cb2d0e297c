"""Processors with narrower registers: tests of the engine and of the kernels again, in a process for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Of each file the tests, as ``-k`` has them, that depend on how wide a register is.
CHOSEN = {
    HERE / "test_engine.py": "test_a_residual_network or test_groups or test_gelu or test_any_convolution",
    HERE / "test_in_lanes.py": "test_activations_from or test_nan or test_any_pooling or test_norms_and_layers "
    "or test_squeeze or (test_upsampling and 3)",
    HERE / "test_group_norms.py": "test_between_convolutions or test_as_exact or test_any_norm or test_instance",
    HERE / "test_linear.py": "test_linear.py",
    HERE / "test_strips.py": "test_bottlenecks",
    HERE / "test_transformers.py": "test_written_by_hand or test_any_attention or test_pytorchs_encoder or test_norms "
    "or test_large_scores",
    HERE.parent / "kernels" / "test_kernels.py": "native and (bits or step)",
}


@pytest.mark.older
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_older_processors(isa: str) -> None:
    """One process for all files, as to start one takes as long as most files do."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, CHOSEN)]
    chosen = " or ".join(f"({words})" for words in CHOSEN.values())
    environment = {**os.environ, "PAREBACK_ISA": isa}
    done = subprocess.run([*command, "-k", chosen], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:]
