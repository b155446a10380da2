"""The decode step as one CUDA graph, CPU work included."""
