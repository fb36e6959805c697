"""Run a model and keep what a comparison needs: the tokens, the logits of each step, and the speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
import mlx_lm


@attrs.frozen(kw_only=True)
class Run:
    """One greedy generation. logits: f32 [V] per token, if they were asked for. tps: decoded tokens per second."""

    tokens: list[int]
    text: str
    logits: list[mx.array] = attrs.field(factory=list, repr=False)
    tps: float
    prompt_tps: float


@attrs.frozen(kw_only=True)
class Comparison:
    """Two runs side by side.

    same: whether all tokens are equal. first: index of the first that differs, or None. steps: steps whose logits were
    compared, those with equal tokens before them. difference: the largest absolute difference of a logit there.
    largest: the largest absolute logit, for scale.
    """

    same: bool
    first: int | None
    steps: int
    difference: float
    largest: float


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, through the model's chat template if it has one."""
    if getattr(tokenizer, "has_chat_template", False):
        message = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    return list(tokenizer.encode(prompt))


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    max_tokens: int,
    *,
    on_text: Callable[[str], None] = lambda _: None,
    keep_logits: bool = False,
) -> Run:
    """Generate greedily with mlx-lm's own loop; ``on_text`` gets each piece of text as it comes."""
    logits: list[mx.array] = []

    def keep(_: Any, step: mx.array) -> mx.array:
        logits.append(step[0].astype(mx.float32))
        return step

    tokens: list[int] = []
    pieces: list[str] = []
    last = None
    processors = [keep] if keep_logits else None
    for last in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, logits_processors=processors):
        if last.finish_reason != "stop":
            tokens.append(last.token)
        text = last.text
        if text and not "".join(pieces) and _spaced(tokenizer, prompt, tokens):
            text = " " + text
        pieces.append(text)
        on_text(text)
    assert last is not None
    del logits[len(tokens) :]  # mlx-lm computes one step ahead
    mx.eval(logits)
    return Run(tokens=tokens, text="".join(pieces), logits=logits, tps=last.generation_tps, prompt_tps=last.prompt_tps)


def _spaced(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether a space parts the prompt from what follows: mlx-lm leaves it out of the text."""
    rest = tokenizer.decode([*prompt, *tokens]).removeprefix(tokenizer.decode(list(prompt)))
    return rest.startswith(" ")


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs of one prompt, made with ``keep_logits``."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if first is None and len(a.tokens) != len(b.tokens):
        first = min(len(a.tokens), len(b.tokens))
    # The step that chose a differing token still had equal tokens before it.
    steps = min(len(a.logits), len(b.logits), len(a.tokens) if first is None else first + 1)
    both = list(zip(a.logits[:steps], b.logits[:steps], strict=True))
    return Comparison(
        same=first is None,
        first=first,
        steps=steps,
        difference=max((_peak(x - y) for x, y in both), default=0.0),
        largest=max((_peak(x) for x, _ in both), default=0.0),
    )


def _peak(x: mx.array) -> float:
    return cast(float, mx.abs(x).max().item())
