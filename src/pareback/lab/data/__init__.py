"""The images of an experiment."""
