"""Checkpoints in 4 and 8 bits, read by coattn itself and kept packed."""
