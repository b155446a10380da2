"""Maintenance that drops entries for good: H2O's heavy hitters, TOVA's one set."""
