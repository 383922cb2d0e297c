"""The compressed file: pruned models on disk, hardly larger than their non-zeros."""

from .describe import Description, describe
from .errors import BadFile
from .export import export
from .load import load
from .onnx import to_onnx
from .save import save

__all__ = ["BadFile", "Description", "describe", "export", "load", "save", "to_onnx"]
