"""Where the KV lives: one file per store."""
