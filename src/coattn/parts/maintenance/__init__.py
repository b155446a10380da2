"""What moves between the tiers from step to step: one folder or file per maintenance."""
