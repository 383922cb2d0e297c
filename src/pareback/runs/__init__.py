"""Runs on disk: their folders, records and the store that finds them."""
