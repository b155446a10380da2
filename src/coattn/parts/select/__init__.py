"""Which of the stored KV is attended: one file per rule."""
