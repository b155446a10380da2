"""One step of a model: groups of layers, prompts, decode steps, and what is known of them."""
