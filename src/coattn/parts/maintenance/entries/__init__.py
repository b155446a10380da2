"""Lists of single entries that stay attended in DRAM (HGCA's contextual cache, sections 3.2 and 3.3)."""
