"""The networks of an experiment."""
