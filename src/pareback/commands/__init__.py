"""Subcommands of ``pareback``: a module each, with its options and what it does. They import the rest when they run."""
