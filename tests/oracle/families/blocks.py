"""Experts in MXFP4, as GPT-OSS stores them: blocks and exponents of stacked matrices (matrices, out, in).

Invariant: the reference computes with the numbers that the blocks represent, as transformers decodes them.
"""

import re

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from .case import Tensors

EXPERTS = re.compile(r"experts\.(gate_up|down)_proj$")
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns blocks and exponents of stacked matrices (matrices, in, out)."""
    matrices = weight.transpose(1, 2)
    groups = matrices.reshape(*matrices.shape[:2], -1, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
    scaled = groups / 2.0 ** exponents[..., None]
    quants = (scaled[..., None] - LEVELS).abs().argmin(-1).to(torch.uint8)
    return quants[..., ::2] | quants[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight as it is stored: experts in MXFP4, others in BF16."""
    if not EXPERTS.search(name):
        return weight.bfloat16().float()
    return convert_moe_packed_tensors(*encode(weight)).float()


def to_blocks(tensors: Tensors, _: dict) -> Tensors:
    """Replaces the experts by their blocks and exponents."""
    stored = {name: tensor for name, tensor in tensors.items() if not EXPERTS.search(name)}
    for name in tensors.keys() - stored.keys():
        blocks, exponents = encode(tensors[name])
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    return stored
