"""Fewer, larger kernels for a step that is captured."""
