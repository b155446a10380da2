"""Benchmarks: every figure beside a limit measured in the same run."""
