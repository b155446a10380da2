"""Who computes: the GPU, and whoever attends to what lies in DRAM. One file each."""
