from collections.abc import Mapping
from typing import Any

from qfuse import Graph, QArray, Quant
from qfuse.graphs import Dims, make

from .down_residual import DownResidual
from .norm_swiglu import NormSwiglu


def dense_mlp(dims: Dims) -> Graph:
    """h [B, H] → out: norm, MLP and residual of a dense layer, 2 dispatches."""
    g = Graph("dense_mlp")
    h = g.input("h", "B, H")
    act = make(NormSwiglu, dims)(h=h)
    out = make(DownResidual, dims)(h=h, act=act)
    g.output(out=out)
    return g


def weights(norm: Any, mlp: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The arrays of a norm and of a quantised MLP, by ``node.spec`` name, and the dims of the graph."""

    def linear(module: Any) -> QArray:
        return QArray(module.weight, module.scales, module.biases, Quant(module.bits, module.group_size))

    arrays = {
        "norm_swiglu.w_norm": norm.weight,
        "norm_swiglu.w_gate": linear(mlp.gate_proj),
        "norm_swiglu.w_up": linear(mlp.up_proj),
        "down_residual.w_down": linear(mlp.down_proj),
    }
    I, H = arrays["norm_swiglu.w_gate"].shape
    quants = {name: array.quant for name, array in arrays.items() if isinstance(array, QArray)}
    return arrays, {"H": H, "I": I, "eps": norm.eps, **quants}
