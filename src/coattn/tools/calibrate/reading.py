"""What all calibrations have in common: a model reads texts under full attention, and a probe looks on."""

from collections.abc import Sequence

from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.hf.architectures import PreTrainedModel
from coattn.hf.converted import Progress, silent
from coattn.hf.forward import Session
from coattn.hf.load import Loaded
from coattn.hf.prefilled import read_prompt
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.probe import Probe
from coattn.text import Text


def tokens_of(loaded: Loaded, text: Text) -> Tensor:
    """Ids `[tokens]` of a text."""
    ids: Tensor = loaded.tokenizer(text.body, return_tensors="pt", verbose=False).input_ids[0]
    return ids


def read(model: PreTrainedModel, texts: Sequence[Tensor], probe: Probe, progress: Progress = silent) -> None:
    """Reads each text `[tokens]` in one prefill, in a runtime of its own."""
    with Session(model) as session:
        for i, ids in enumerate(texts):
            read_prompt(session, compose(METHODS["full"]), Ledger(), ids, (), len(ids), [probe])
            progress("texts read", i + 1, len(texts))
