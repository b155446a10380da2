"""Runs steps: layer by layer, or decode steps as one CUDA graph, CPU work included."""
