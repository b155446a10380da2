"""How a recorded GPU step and the CPU's workers hand work to each other."""
