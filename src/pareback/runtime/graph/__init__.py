"""From a model to operations: capture, the operations themselves, and rewriting of their list."""
