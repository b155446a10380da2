"""The parts of exact methods and of the three papers, an axis a folder, and the hand-over to the CPU."""
