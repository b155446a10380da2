"""What is remembered to choose by: one file per index."""
