"""Blocks with digests, by which a rule can tell what they hold: in a pool, or resident over an arena."""
