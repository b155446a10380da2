"""A pool of resident blocks in GPU memory, and the recall of what was missed (ScoutAttention, section 3.4)."""
