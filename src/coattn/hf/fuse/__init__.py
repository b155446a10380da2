"""Fewer, larger kernels for a step that is captured.

Nothing is assumed from names alone: a fused form is used only after it gave what the module itself gives, on the
module's own weights. What does not fit stays as Transformers computes it.
"""

from coattn.hf.fuse.fusion import Fusion

__all__ = ["Fusion"]
