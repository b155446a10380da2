"""Who computes: one file per place."""
