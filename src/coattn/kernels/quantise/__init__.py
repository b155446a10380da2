"""Product quantisation of keys: codebooks, codes, and scores from codes."""
