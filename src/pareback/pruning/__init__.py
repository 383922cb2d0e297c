"""Pruning while a model trains: the pruner, its two mounts, and the optimizer's side of both."""
