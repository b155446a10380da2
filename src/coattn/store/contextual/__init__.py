"""A weighed window, the arena, and the entries of it that matter to each head."""
