"""Operations on tensors: one file per stem, dispatched by device; `reference/` holds the plain meaning of each."""
