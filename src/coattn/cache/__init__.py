"""Keys and values: what lies in GPU memory, what in DRAM, and the table that says where, step by step."""
