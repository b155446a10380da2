"""How a captured GPU step and the CPU's workers hand work to each other."""
