"""The engine: many requests, one model, one method; they join and leave between steps."""
