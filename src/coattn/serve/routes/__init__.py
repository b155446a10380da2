"""One file for what is alike."""
