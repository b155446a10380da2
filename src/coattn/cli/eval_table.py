"""`coattn eval table`."""
