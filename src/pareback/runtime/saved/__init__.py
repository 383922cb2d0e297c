"""A compiled engine as a file: the model as data, its weights, and what was measured; read with no word believed."""
