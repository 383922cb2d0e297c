"""The sparse CPU engine: compiles a pruned model for this machine and runs it."""

from .engine import Engine, compile
from .report import EngineReport

__all__ = ["Engine", "EngineReport", "compile"]
