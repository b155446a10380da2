"""Plain-PyTorch meaning of every operation: short, obviously right, any device. Every backend is tested against it."""
