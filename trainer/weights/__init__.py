"""Weights of the reference, read and written: names, settings, files."""
