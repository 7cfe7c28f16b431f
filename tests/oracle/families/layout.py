"""Converts a reference's weights to the layout of the family's files: names, fused tensors, copies, and unused
tensors.

Invariant: every weight of the reference is in the files once, or more often if the family's files repeat it.
"""

import re
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .case import Case, Tensors


def to_files(case: Case, model: torch.nn.Module) -> Tensors:
    """Returns the tensors of model.safetensors, in the case's data type."""
    tensors = model.state_dict() if case.own else as_saved(model)
    if case.layout.reshape:
        tensors = case.layout.reshape(tensors, case.config)
    tensors = {renamed(case, name): tensor for name, tensor in tensors.items()}
    for name, copy in case.layout.copies:
        tensors[copy] = tensors[name].clone()
    stored = {name: t if t.dtype == torch.uint8 else t.to(case.dtype) for name, t in tensors.items()}
    tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
    return tensors | (case.layout.extra(case.config) if case.layout.extra else {})


def as_saved(model: torch.nn.Module) -> Tensors:
    """Returns the weights as the library saves them, which undoes the fusing in its classes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def renamed(case: Case, name: str) -> str:
    for pattern, replacement in case.layout.names:
        name = re.sub(pattern, replacement, name)
    return name


def write(case: Case, folder: Path, model: torch.nn.Module):
    tensors = to_files(case, model)
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", metadata={"format": "pt"})
