"""The demo: one document, one fact in it, one question, and every method from the same keys and values."""
