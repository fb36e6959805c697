"""Fused decode kernels for MLX: a declared graph of ops, with a reference for each."""

from .fuse import Fusion, FusionReport, fuse
from .graphs import Graph
from .models import RefusedError
from .op import REGISTRY, Op, op
from .plan import Plan, build
from .spec import Handle, In, Out, QArray, Quant, QWeight, SpecError, Weight

__version__ = "0.1.0"

__all__ = [
    "REGISTRY",
    "Fusion",
    "FusionReport",
    "Graph",
    "Handle",
    "In",
    "Op",
    "Out",
    "Plan",
    "QArray",
    "QWeight",
    "Quant",
    "RefusedError",
    "SpecError",
    "Weight",
    "build",
    "fuse",
    "op",
]
