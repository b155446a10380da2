"""When the places work: one file per schedule."""
