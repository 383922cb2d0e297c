"""What a model is made of and what it costs: tensors that can be pruned, FLOPs, amounts, and limits on them."""
