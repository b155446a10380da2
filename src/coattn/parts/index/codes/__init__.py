"""Codes of keys: product quantisation, and the mean of values."""
