"""Pruning inside training frameworks: a module for each, which imports its framework only when it is used.

``lightning.Prune`` and ``transformers.Prune`` are callbacks. ``dcp`` saves and loads distributed checkpoints,
``accelerate`` finds what Accelerate has wrapped, and ``peft`` merges adapters into a pruned model.
"""
