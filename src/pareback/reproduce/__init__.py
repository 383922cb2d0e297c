"""The paper's tables and figures, trained again, and the demo."""
