"""Experiments: data, models, a trainer, and the paper's tables. Needs the extra: ``pip install 'pareback[lab]'``."""
