"""Operations on tensors: one file per stem, dispatched by device; its plain meaning stands there (`operation.py`)."""
