"""Differences between families and the classes that they borrow. Each function changes a model in place, before its
weights are set."""

import torch
import torch.nn.functional as F
from torch import nn


def alibi(model: nn.Module, config: dict):
    """Adds slopes times the distance to the scores, and removes rotations."""
    plain, rotary = model.forward, model.model.rotary_emb
    biases = slopes(config["num_attention_heads"])

    def unrotated(x, position_ids):
        angles = torch.zeros(*position_ids.shape, config["hidden_size"] // config["num_attention_heads"])
        return angles.cos(), angles.sin()

    def biased(input_ids, **options):
        n = input_ids.shape[1]
        distance = torch.arange(n)[:, None] - torch.arange(n)[None]
        mask = torch.where(distance >= 0, -biases[:, None, None] * distance, torch.finfo(torch.float32).min)
        return plain(input_ids=input_ids, attention_mask=mask[None], **options)

    rotary.forward = unrotated
    model.forward = biased


def slopes(heads: int) -> torch.Tensor:
    """Returns one slope per head: powers of 2^(-8/n) for the greatest power of two n, then every second one of
    2^(-4/n)."""
    n = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 / n * (k + 1)) for k in range(n)]
    rest = [2 ** (-4 / n * (2 * k + 1)) for k in range(heads - n)]
    return torch.tensor(first + rest)


def alibi_max(model: nn.Module, config: dict):
    """Uses ALiBi slopes for another maximum than 8."""
    transformer, most = model.transformer, config["attn_config"]["alibi_bias_max"]
    plain = transformer.build_mpt_alibi_tensor
    transformer.build_mpt_alibi_tensor = lambda heads, length, **options: plain(heads, length, most, **options)


def unit_head(model: nn.Module, config: dict):
    head = model.lm_head
    head.forward = lambda x: F.linear(x, F.normalize(head.weight))


def alibi_and_unit_head(model: nn.Module, config: dict):
    alibi(model, config)
    unit_head(model, config)


def layer_norms(model: nn.Module, config: dict):
    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    model.model.norm = norm()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()


def open_shared_gate(model: nn.Module, config: dict):
    for layer in model.model.layers:
        if hasattr(layer.mlp, "shared_expert_gate"):
            layer.mlp.shared_expert_gate = Open()


class Open(nn.Module):
    """A gate logit so large that its sigmoid is 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((*x.shape[:-1], 1), 1e4)


def own_head(model: nn.Module, config: dict):
    """Unties the head. The library's class does this only when it reads a file that has a head."""
    model.lm_head = nn.Linear(config["d_model"], config["vocab_size"], bias=False)


def own_unscaled_head(model: nn.Module, config: dict):
    """Unties the head, whose input is then not scaled."""
    own_head(model, config)
    model.config.tie_word_embeddings = False
