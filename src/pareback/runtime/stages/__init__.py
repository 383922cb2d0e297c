"""The stages of a compiled model, each with the ways it may run, and the partition of a model into them."""
