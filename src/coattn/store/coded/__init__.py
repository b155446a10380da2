"""Codes of keys near, values far."""
