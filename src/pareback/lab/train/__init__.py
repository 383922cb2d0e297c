"""The training of an experiment."""
