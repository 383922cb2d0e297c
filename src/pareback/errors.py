"""Errors that are about what a user gave or did. Each message says what to write instead.

They are also the built-in errors that Python's own habits ask for, so ``except ValueError`` goes on working, and
``except pb.UserError`` catches them all and nothing that went wrong inside.
"""

from __future__ import annotations


class UserError(Exception):
    """Base of every error that a user can mend."""


class InvalidValue(UserError, ValueError):
    """An argument, a file or a setting has a value that cannot be used."""


class InvalidType(UserError, TypeError):
    """An argument is of a kind that cannot be used."""


class InvalidUse(UserError, RuntimeError):
    """Something was asked for at a time, or in a state, in which it cannot be done."""


class MissingFile(UserError, FileNotFoundError):
    """A file or folder that was named is not there."""


class BadFile(InvalidValue):
    """A file that is damaged, incomplete, or not of the kind it should be."""


class DiskFullError(UserError, OSError):
    """A file for which there was no room. Its message names the file."""


class FileSizeError(DiskFullError):
    """A file that became larger than files may be here. Its message names the file."""


class LostProcess(UserError, RuntimeError):
    """Another process of the same training that is gone, or does not answer."""


class LittleMemory(UserError, MemoryError):
    """Something for which there was not enough memory, or no room for another thread."""


class NotPermitted(UserError, PermissionError):
    """A file that may not be written. Its message names the file."""
