"""The compiled engine: its C++ and how Python calls it."""
