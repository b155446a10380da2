"""Logits to tokens, and tokens to text."""
