"""GPU kernels in Triton, named like their references."""
