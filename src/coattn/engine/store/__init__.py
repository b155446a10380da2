"""What is stored of sequences outside the slots: in GPU memory, in DRAM and on disk. `SequenceStore` is its face."""
