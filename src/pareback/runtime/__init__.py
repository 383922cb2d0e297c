"""The sparse CPU engine: compiles a pruned model for this machine and runs it."""

from .engine import Engine, compile, load_engine
from .report import EngineReport

__all__ = ["Engine", "EngineReport", "compile", "load_engine"]
