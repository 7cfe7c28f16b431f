"""Creates a case's reference with random weights, and reads it back from the written folder.

Every parameter is random, including norms and biases, and already rounded to its stored type.

Invariant: a seed determines the weights, independently of the library's initialization.
"""

import copy
import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from . import layout
from .case import Case


def build(case: Case, words: dict | None = None) -> torch.nn.Module:
    """Creates the reference with the library's initial weights. `words` replaces the case's own config.json."""
    words = words or case.config
    if case.own:
        return case.model(words).eval()
    settings = copy.deepcopy(case.settings(words) if case.settings else words)
    if case.borrowed:
        settings["model_type"] = case.model.config_class.model_type
    config = case.model.config_class.from_dict(settings)
    model = case.model._from_config(config, attn_implementation=case.attention)
    if case.patch:
        case.patch(model, words)
    return model.eval()


@torch.no_grad()
def randomise(case: Case, seed: int) -> torch.nn.Module:
    model = build(case)
    random = torch.Generator().manual_seed(seed)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, weight in weights_of(case, model):
        weight.copy_(draw(case, name, weight, random))
    embedding.weight.mul_(case.embedding_std / case.std)
    if head is not None and head.weight is not embedding.weight:
        head.weight.mul_(case.head_gain)
    for name, weight in weights_of(case, model):
        weight.copy_(case.rounded(name, weight) if case.rounded else weight.to(case.dtype).float())
    return model


def weights_of(case: Case, model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith(case.random_buffers)]
    # Frozen parameters are tables that the library computes.
    return [*((n, p) for n, p in model.named_parameters() if p.requires_grad), *buffers]


def draw(case: Case, name: str, weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=random)
    if name.endswith("bias"):
        return case.bias_std * noise
    if weight.dim() == 1:
        return case.means.get(name, case.norm_mean) + 0.2 * noise
    gain = math.prod(factor for pattern, factor in case.gains.items() if re.search(pattern, name))
    return case.std * gain * noise


def read_back(case: Case, folder: Path, written: torch.nn.Module) -> torch.nn.Module:
    """Reads the reference from the folder. If the class belongs to another family, the files are compared instead."""
    if case.borrowed:
        stored = load_file(folder / "model.safetensors")
        expected = layout.to_files(case, written)
        assert stored.keys() == expected.keys(), case.name
        assert all(torch.equal(stored[name], expected[name]) for name in stored), case.name
        return written
    if case.own:
        model = case.model(json.loads((folder / "config.json").read_text()))
        model.load_state_dict(
            {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        )
        return model.eval()
    assert type(AutoConfig.from_pretrained(folder)) is case.model.config_class, case.name
    model, loading = case.model.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=case.attention, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"], (case.name, loading)
    return model.eval()
