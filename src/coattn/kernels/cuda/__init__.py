"""Kernels in CUDA C++, compiled for the GPU at hand when they are first used."""
