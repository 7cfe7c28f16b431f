"""Trains one of the two demo models within a given wall-clock time and exports it.

The learning rate depends on the elapsed time and reaches zero at the end, so that a busy machine reduces the number
of steps but not the annealing. Matrices of the layers are trained with Muon, all other parameters with AdamW.

Invariant: the exported weights are BF16; the float32 weights stay in the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

import layout
from corpus import STORY_SHARE, rows
from muon import Muon

SHORT, LONG, LONG_EVERY = 512, layout.CONTEXT, 8
TOKENS_A_STEP = 2048
# Each worker computes the gradients of its part of a batch on one core. On a busy machine, this is several times as
# fast as one worker on all cores, in which every operation would wait for the slowest core.
WORKERS = 2
WARMUP = 0.02


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes config, generation config and BF16 weights."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    settings = json.loads((folder / "config.json").read_text())
    # Programs that read the older config layout need these two keys.
    settings |= {"rope_theta": layout.ROPE_THETA, "torch_dtype": "bfloat16"}
    write_json(folder / "config.json", settings)
    write_json(folder / "generation_config.json", layout.GENERATION)


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes sorted, indented JSON."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def batches(tokenizer: Tokenizer, seed: int, stories: float) -> Iterator[torch.Tensor]:
    """Yields batches (rows, length + 1) with a fixed number of tokens; at intervals, a batch has rows of the full
    context."""
    short = rows(tokenizer, seed, SHORT + 1, stories)
    long = rows(tokenizer, seed + 1, LONG + 1, stories)
    step = 0
    while True:
        step += 1
        source, length = (long, LONG) if step % LONG_EVERY == 0 else (short, SHORT)
        yield torch.from_numpy(np.stack([next(source) for _ in range(TOKENS_A_STEP // length)]))


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Creates one Muon optimizer per worker for matrices of the layers, and AdamW for embeddings and norms; all use
    one rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [
        *(Muon(matrices[part::WORKERS], lr=rate) for part in range(WORKERS)),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def share_of_rate(elapsed: float) -> float:
    """Returns the fraction of the peak learning rate at a fraction of the time: a short rise, a plateau, a decay to
    zero."""
    if elapsed < WARMUP:
        return elapsed / WARMUP
    return max(0.0, min(1.0, (1.0 - elapsed) / 0.6))


def gradients(model: LlamaForCausalLM, batch: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Returns the loss (nats per token) on a batch and the gradients of the parameters."""
    logits = model(input_ids=batch[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    return loss.item(), torch.autograd.grad(loss, tuple(model.parameters()))


def step(
    model: LlamaForCausalLM,
    batch: torch.Tensor,
    stepping: list[torch.optim.Optimizer],
    rate: float,
    pool: ThreadPoolExecutor,
) -> float:
    """Runs one step at a learning rate, and returns the loss (nats per token) before it."""
    parts = list(pool.map(lambda part: gradients(model, part), batch.chunk(WORKERS)))
    for parameter, *grads in zip(model.parameters(), *(grads for _, grads in parts)):
        parameter.grad = torch.stack(grads).mean(0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in stepping:
        for group in optimizer.param_groups:
            group["lr"] = rate
    list(pool.map(lambda optimizer: optimizer.step(), stepping))
    return float(np.mean([loss for loss, _ in parts]))


def train(model: LlamaForCausalLM, given: argparse.Namespace) -> None:
    """Runs steps until the time is over, with a log line and a checkpoint every minute."""
    tokenizer = Tokenizer.from_file(str(layout.MAIN / "tokenizer.json"))
    stepping = optimizers(model, given.rate)
    start = reported = time.monotonic()
    losses: list[float] = []
    pool = ThreadPoolExecutor(WORKERS)
    for steps, batch in enumerate(batches(tokenizer, given.seed, given.stories)):
        now = time.monotonic()
        elapsed = (now - start) / (given.minutes * 60.0)
        if now - reported > 60.0 or elapsed >= 1.0:
            mean = float(np.mean(losses))
            print(f"{elapsed:.3f} steps {steps} tokens {steps * TOKENS_A_STEP} loss {mean:.4f}", flush=True)
            reported, losses = now, []
            torch.save(model.state_dict(), given.checkpoint)
        if elapsed >= 1.0:
            return
        losses.append(step(model, batch, stepping, given.rate * share_of_rate(elapsed), pool))


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", choices=["main", "draft"])
    options.add_argument("--minutes", type=float, required=True, help="wall-clock time; 0 only exports")
    options.add_argument("--checkpoint", type=Path, required=True, help="file for the float32 weights")
    options.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    options.add_argument("--seed", type=int, default=2)
    options.add_argument("--resume", type=Path, help="checkpoint to start from")
    options.add_argument(
        "--stories", type=float, default=STORY_SHARE, help="fraction of stories among the documents"
    )
    options.add_argument("--no-export", action="store_true")
    given = options.parse_args()
    folder = layout.MAIN if given.model == "main" else layout.DRAFT
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    model = LlamaForCausalLM(layout.CONFIGS[folder])
    if given.resume:
        model.load_state_dict(torch.load(given.resume, weights_only=True))
    print(f"{given.model}: {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    if given.minutes > 0.0:
        train(model, given)
    if not given.no_export:
        export(model, folder)


if __name__ == "__main__":
    main()
