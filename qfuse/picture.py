"""One request for a picture or a table of what a decode step runs: what ``qfuse graph`` is made of."""

from __future__ import annotations

from functools import cached_property

import attrs
import mlx.core as mx
import mlx.nn as nn
from rich.console import RenderableType
from rich.markup import escape

from . import backends as backend_table
from . import devices, draw, hollow, load
from .committed import count_step
from .configs import CONFIGS
from .count import ModelCount, count_model, counts_data, part_graph
from .describe import GraphData, to_json
from .show import counts_table, nodes_table, to_text

DEFAULT = "qwen3.5-35b-a3b"


@attrs.frozen(kw_only=True, slots=False)
class Request:
    """What to show. part: gdn, gqa, moe, layer or model. mode: 0 vanilla, 1 or 2, see qfuse.fuse.

    config: a name of qfuse.configs, or model: a checkpoint folder. bits: of a config, 8 by default. rows, keys: of the
    step. device: a name of qfuse.devices, or None. committed: count on this machine's CUDA GPU too.
    Raises ValueError on what does not exist or does not go together, CheckpointError on a folder that is no checkpoint.
    """

    part: str = "layer"
    mode: int = 2
    config: str | None = None
    model: str | None = None
    bits: int | None = None
    rows: int = 1
    keys: int = 1024
    backends: tuple[str, ...] = ("metal",)
    moe: str = "moe_4"
    device: str | None = None
    committed: bool = False

    def __attrs_post_init__(self) -> None:
        if self.config is not None and self.model is not None:
            raise ValueError(f"[graph] wants a config or a model, got {self.config} and {self.model}")
        if self.model is not None and self.bits is not None:
            raise ValueError(f"[graph] wants the model's own bits, got {self.bits}")
        if self.config is not None and self.config not in CONFIGS:
            raise ValueError(f"[config] wants one of {', '.join(CONFIGS)}, got {self.config}")
        if (self.mode < 2 and self.part == "moe") or (self.mode == 1 and self.part in ("gdn", "gqa")):
            raise ValueError(f"[graph] wants layer or model in mode {self.mode}, got {self.part}: it has no such graph")
        if self.committed and self.model is not None:
            raise ValueError(f"[committed] wants a config, got the model {self.model}")
        for name in self.backends:
            backend_table.find(name)
        if self.device is not None:
            devices.find(self.device)

    @property
    def name(self) -> str:
        """What is shown: a checkpoint's folder, or a config and its bits."""
        return self.model or f"{self.config or DEFAULT}, {self.bits or 8}-bit"

    @cached_property
    def net(self) -> nn.Module:
        """The model, without weights."""
        if self.model is not None:
            return load.hollow(load.locate(self.model))
        return hollow.model_of(CONFIGS[self.config or DEFAULT], bits=self.bits or 8, group=64, dtype=mx.bfloat16)

    @cached_property
    def count(self) -> ModelCount:
        """Vanilla and both modes, counted as for the device's kind of GPU, or for Metal."""
        gpu = devices.find(self.device).gpu if self.device else "metal"
        return count_model(
            self.net, self.name, rows=self.rows, keys=self.keys, backends=self.backends, moe=self.moe, gpu=gpu
        )

    def graphs(self) -> list[GraphData]:
        """The graphs asked for."""
        if self.part == "model":
            return [self.count.graph(self.mode)]
        if self.part == "moe":
            return [part_graph(self.net, self.moe, rows=self.rows, keys=self.keys, backends=self.backends)]
        kinds = ("gdn", "gqa") if self.part == "layer" else (self.part,)
        if self.part == "layer" or self.mode == 0:
            return [layer.modes[self.mode].graph for layer in self.count.layers if layer.kind in kinds]
        return [part_graph(self.net, self.part, rows=self.rows, keys=self.keys, backends=self.backends)]

    def table(self, width: int = 120) -> bytes:
        """The nodes of each graph, then dispatches and bytes of a token in every mode."""
        device = devices.find(self.device) if self.device else None
        parts: list[RenderableType] = []
        for graph in self.graphs() if self.part != "model" else []:
            parts += [nodes_table(graph), ""]
        parts.append(counts_table(self.count, device))
        reasons = [layer for layer in self.count.layers if layer.reason]
        parts += [escape(f"{layer.kind} layers stay vanilla: {layer.reason}") for layer in reasons]
        if device is not None:
            parts.append(escape(f"An estimate, bytes / memory speed + dispatches · cost of one. {device.sources()}"))
        if self.committed:
            parts.append(self._committed())
        return (to_text(*parts, width=max(width, 100)) + "\n").encode()

    def render(self, form: str) -> bytes:
        """Any other format: mermaid, dot, json as text, svg, png, html as files. Raises PictureError."""
        graphs = self.graphs()
        if form == "json":
            return to_json(graphs, counts=counts_data(self.count)).encode()
        if form == "mermaid":
            return draw.to_mermaid(graphs).encode()
        title = self._title(graphs)
        if form == "html":
            return self._page().encode()
        dot = draw.to_dot(graphs, title=title)
        return dot.encode() if form == "dot" else draw.render(dot, form)

    def _committed(self) -> str:
        """What the GPU launched for one block of layers, beside what a trace of it says."""
        config = CONFIGS[self.config or DEFAULT]
        config = {**config, "num_hidden_layers": config["full_attention_interval"]}
        bits = self.bits or 8
        counted = count_step(config, bits=bits, rows=self.rows, keys=self.keys, backends=self.backends, moe=self.moe)
        net = hollow.model_of(config, bits=bits, group=64, dtype=mx.bfloat16)
        traced = count_model(net, "", rows=self.rows, keys=self.keys, backends=self.backends, moe=self.moe, gpu="cuda")
        text = ", ".join(
            f"{f'mode {mode}' if mode else 'vanilla'} {count} ({traced.dispatches(mode)} by the trace)"
            for mode, count in counted.items()
        )
        return f"Kernels in the graphs that MLX committed for a model of {len(net.layers)} layers: {text}"

    def _title(self, graphs: list[GraphData]) -> str:
        if len(graphs) > 1:
            return f"{self.name}, {self._step}"
        return f"{graphs[0].name}: {draw.summary(graphs[0])}\n{self.name}, {self._step}"

    @property
    def _step(self) -> str:
        return f"{self.rows} row{'s' * (self.rows > 1)}, {self.keys} keys"

    def _page(self) -> str:
        """Vanilla beside the mode, whole layers or the whole model."""
        if self.part == "moe":
            raise ValueError("[graph] wants gdn, gqa, layer or model for html, got moe: vanilla has no such part")
        if self.mode == 0:
            raise ValueError("[graph] wants mode 1 or 2 beside vanilla in html, got 0")
        kinds = [layer for layer in self.count.layers if self.part in ("layer", layer.kind)]
        sides = [
            [self.count.graph(mode)] if self.part == "model" else [layer.modes[mode].graph for layer in kinds]
            for mode in (0, self.mode)
        ]
        count = self.count
        notes = [
            f"One token of the whole model, {self._step}: "
            f"{count.dispatches(0)} dispatches and {draw.size(count.bytes(0) or 0)} in vanilla mlx-lm, "
            f"{count.dispatches(self.mode)} and {draw.size(count.bytes(self.mode) or 0)} in mode {self.mode}."
        ]
        return draw.to_html(*sides, title=f"{self.name}: vanilla beside mode {self.mode}", notes=notes)
