"""A dense MLP with its norm and residual, h + MLP(RMSNorm(h)), in two dispatches."""

from .down_residual import DownResidual
from .graph import dense_mlp, weights
from .norm_swiglu import NormSwiglu

__all__ = ["DownResidual", "NormSwiglu", "dense_mlp", "weights"]
