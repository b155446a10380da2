"""Where a sequence's tokens lie in GPU memory: four layouts."""
