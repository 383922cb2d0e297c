"""What a run ran on, and since when."""

from __future__ import annotations

import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..runtime.lower.tuning import processor_name

_IMPORTED = time.monotonic()


def describe(device: torch.device) -> dict[str, Any]:
    """Return the versions and the machine."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pareback": __version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cpu": processor_name(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(sys.argv),
    }


def process_start() -> float:
    """Return when this process began, on the clock of ``time.monotonic()``: a user waits for imports, too."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux: since this module was imported
        return _IMPORTED
    return time.monotonic() - age
