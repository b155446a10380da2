"""Kernels of fused forms stay in their tensors."""

from tests.kernels.triton.addresses import addresses as addresses
