"""Where a step's time went: GPU, CPU and the way between them."""
