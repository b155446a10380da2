"""Attention of a prompt's tokens: many queries of one sequence over keys that are in hand, with the log-sum-exp."""

from coattn.kernels.prompt.attend import attend_prompt
from coattn.kernels.prompt.mask import Mask

__all__ = ["Mask", "attend_prompt"]
