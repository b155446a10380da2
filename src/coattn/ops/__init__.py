"""Operations on tensors: one file per stem, dispatched by device; `reference/` holds the plain-PyTorch meaning of each."""
