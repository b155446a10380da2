"""Executors compute attention: the GPU, or what attends to DRAM. One file each."""
