"""The operations in C++, for tensors in host memory. Same stems as the references."""
