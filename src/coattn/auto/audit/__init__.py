"""Audits: what a rule left out and how far its output is off, measured on samples of what it does."""
