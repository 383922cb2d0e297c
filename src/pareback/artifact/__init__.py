"""The compressed file: pruned models on disk, hardly larger than their non-zeros."""

from ..errors import BadFile
from .describe import Description, describe
from .export import export, to_onnx
from .load import load
from .save import save

__all__ = ["BadFile", "Description", "describe", "export", "load", "save", "to_onnx"]
