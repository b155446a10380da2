"""DuoAttention: retrieval heads attend to everything, the others to the first and the newest tokens."""
