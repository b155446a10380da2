"""What clients get, built as plain objects: a stream has one per token, and they must cost little."""
