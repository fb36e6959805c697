"""Train qfuse's default model: a small Qwen3_5Moe, by transformers' own class, on the text that corpus.py writes.

    python train.py --corpus corpus --out trained

Writes an ordinary Hugging Face checkpoint (config.json, model.safetensors in bf16, the tokenizer's files) and
train.json, which says how it was made. It is written anew at each evaluation that is the best so far on the held-out
text, so a run that is cut short leaves a usable one. Needs torch and transformers; meant for one GPU, it runs on a CPU
too, slowly.

Every random number comes from --seed, and torch is told to raise on an operation that is not deterministic: the same
options, device and versions give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5Tokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

VOCAB = 2048
CONFIG = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "router_aux_loss_coef": 0.01,
    "eos_token_id": 0,
}


def train_tokenizer(files: list[Path]) -> Qwen3_5Tokenizer:
    """Byte-level BPE, by the family's own rules for words and numbers; id 0 is the end of a text."""
    return Qwen3_5Tokenizer().train_new_from_iterator((file.read_text() for file in files), VOCAB)


def encode(tokenizer: Qwen3_5Tokenizer, files: list[Path]) -> Tensor:
    """The files' tokens one after another, with an end of text before each and after the last."""
    ids = [0]
    for file in files:
        ids += [*tokenizer.encode(file.read_text()), 0]
    return torch.tensor(ids)


def every_expert(self: nn.Module, x: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """All experts on every token, those not chosen with weight 0: the routed sum, without its scatter.

    At this size it is faster than routing, and it is deterministic.
    """
    weights = x.new_zeros(len(x), self.num_experts).scatter(1, indices, scores.to(x.dtype))
    gate, up = functional.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(1, (self.num_experts, 2, -1)).unbind(2)
    hidden = self.act_fn(gate) * up * weights[..., None].to(gate.dtype)
    return functional.linear(hidden.flatten(1), self.down_proj.transpose(0, 1).flatten(1)).to(x.dtype)


ALL_EXPERTS_FUNCTIONS.register("every_expert", every_expert)


class Balance:
    """The load-balancing loss of each layer's router, E · sum_e(share of choices · mean probability); 1 is even."""

    def __init__(self, model: nn.Module) -> None:
        self.losses: list[Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self.hook)

    def hook(self, gate: nn.Module, _: Any, outputs: tuple[Tensor, ...]) -> None:
        logits, _, indices = outputs
        probability = logits.float().softmax(-1).mean(0)
        share = functional.one_hot(indices, gate.num_experts).float().sum((0, 1)) / indices.numel()
        self.losses.append(gate.num_experts * (share * probability).sum())

    def take(self) -> Tensor:
        """The mean over the layers run since the last call."""
        losses, self.losses = self.losses, []
        return torch.stack(losses).mean()


def add_dropout(model: nn.Module, p: float) -> None:
    """Dropout on the embeddings and on what each mixer and each MoE adds to the residual; transformers has none."""

    def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, p, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
        mixer.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


def optimiser(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def batches(ids: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [batch, length + 1]: windows side by side from a random start, shuffled, each epoch anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(length, (1,), generator=generator))
        windows = ids[start:].unfold(0, length + 1, length)
        order = torch.randperm(len(windows), generator=generator)
        for part in order.split(batch):
            if len(part) == batch:
                yield windows[part.to(ids.device)]


def forward(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, in nats, of each token of windows [B, L + 1] but the first."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def bits_per_byte(model: nn.Module, ids: Tensor, length: int, size: int) -> float:
    """Of held-out text of ``size`` bytes, in windows that know nothing of what came before."""
    model.eval()
    whole = (len(ids) - 1) // length * length
    rows = [ids[: whole + 1].unfold(0, length + 1, length)]
    if whole < len(ids) - 1:
        rows.append(ids[None, whole:])
    nats = sum(float(forward(model, part, "sum")) for windows in rows for part in windows.split(32))
    model.train()
    return nats / math.log(2) / size


def save(model: nn.Module, tokenizer: Qwen3_5Tokenizer, record: dict[str, Any], folder: Path) -> None:
    """The checkpoint, with a config.json laid out as the family's own is: the text model's under ``text_config``."""
    state = {k: v if k.endswith("A_log") else v.bfloat16() for k, v in model.state_dict().items()}
    del state["lm_head.weight"]  # it is the embedding's
    model.save_pretrained(folder, state_dict=state, save_original_format=False)  # experts in one array, as mlx-lm reads
    tokenizer.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "text_config": text | {"dtype": "bfloat16"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "train.json").write_text(json.dumps(record, indent=2) + "\n")


def train(options: argparse.Namespace) -> None:
    """Train by these options and write the checkpoint."""
    start = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a guard that costs a launch for each new tensor
    torch.set_float32_matmul_precision("high")  # the delta rule's f32 products in tf32

    files, unseen = (sorted((options.corpus / kind).glob("*.txt")) for kind in ("train", "heldout"))
    tokenizer = train_tokenizer(files)
    ids, heldout = (encode(tokenizer, each).to(device) for each in (files, unseen))
    size = sum(file.stat().st_size for file in unseen)
    config = Qwen3_5MoeTextConfig(**CONFIG)
    config._attn_implementation, config._experts_implementation = "sdpa", "every_expert"
    model = Qwen3_5MoeForCausalLM(config).float().to(device)
    balance = Balance(model)
    add_dropout(model, options.dropout)
    optimizer = optimiser(model, options.rate, options.decay)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.2f} M parameters, {len(ids) / 1e6:.2f} M tokens, {len(heldout)} held out", flush=True)

    best, history = math.inf, []
    stream = batches(ids, options.batch, options.length, options.seed)
    for step in range(1, options.steps + 1):
        scale = min(step / options.warmup, (options.steps - step) / (options.steps - options.warmup))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * scale
        loss, uneven = forward(model, next(stream)), balance.take()
        (loss + config.router_aux_loss_coef * uneven).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.evaluate and step != options.steps:
            continue
        bits = bits_per_byte(model, heldout, options.length, size)
        balance.take()
        row = {"step": step, "loss": loss.item(), "balance": uneven.item(), "heldout_bits_per_byte": bits}
        history.append(row | {"seconds": round(time.time() - start, 1)})
        print(json.dumps(history[-1]), flush=True)
        if bits < best:
            best = bits
            record = {
                "parameters": count,
                "train_tokens": len(ids),
                "epochs": step * options.batch * options.length / len(ids),
                "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
                "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "history": history,
            }
            save(model, tokenizer, record, options.out)
    print(f"best {best:.4f} bits per byte, {time.time() - start:.0f} s, {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("corpus"))
    parser.add_argument("--out", type=Path, default=Path("trained"))
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a window")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate; it falls linearly to 0")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--evaluate", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
