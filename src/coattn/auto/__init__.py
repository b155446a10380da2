"""The method `auto`: a sketch of every key, floors, the pool of tokens in GPU memory, and its audit."""
