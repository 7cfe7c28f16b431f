"""OpenELM, whose code is not part of transformers: computed from its formulas. Layers differ in their numbers of heads
and in the widths of their MLPs.

A layer is x + attention(norm x), then x + mlp(norm x), with RMS norms, also of each query and key head before RoPE.
The MLP is proj_2(silu(a) * b) for the halves a, b of proj_1; its width is the multiple of ffn_dim_divisor nearest to
ffn_multipliers times model_dim. The head is tied.

Invariant: the parameters of a module have the names of the tensors in the files.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from .case import BF16, Case

EPS = 1e-6
CONFIG = {
    "activation_fn_name": "swish",
    "architectures": ["OpenELMForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "ffn_dim_divisor": 8,
    "ffn_multipliers": [0.8, 1.3, 2.0],
    "ffn_with_glu": True,
    "head_dim": 8,
    "initializer_range": 0.02,
    "max_context_length": 128,
    "model_dim": 32,
    "model_type": "openelm",
    "normalization_layer_name": "rms_norm",
    "normalize_qk_projections": True,
    "num_gqa_groups": 2,
    "num_kv_heads": [1, 2, 2],
    "num_query_heads": [2, 4, 4],
    "num_transformer_layers": 3,
    "qkv_multipliers": [0.5, 1.0],
    "rope_freq_constant": 10000,
    "rope_max_length": 256,
    "share_input_output_layers": True,
    "use_cache": True,
    "vocab_size": 96,
}


class OpenElm(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.c = c = SimpleNamespace(**config)
        self.transformer = nn.Module()
        self.transformer.token_embeddings = nn.Embedding(c.vocab_size, c.model_dim)
        self.transformer.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_transformer_layers))
        self.transformer.norm = nn.RMSNorm(c.model_dim, eps=EPS)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.token_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.token_embeddings

    def forward(self, input_ids, **_):
        x = self.transformer.token_embeddings(input_ids[0])
        for layer in self.transformer.layers:
            x = layer(x)
        logits = self.transformer.norm(x) @ self.transformer.token_embeddings.weight.T
        return SimpleNamespace(logits=logits[None])


class Layer(nn.Module):
    def __init__(self, c, i: int):
        super().__init__()
        self.attn_norm, self.ffn_norm = (nn.RMSNorm(c.model_dim, eps=EPS) for _ in range(2))
        self.attn, self.ffn = Attention(c, i), Ffn(c, i)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self, c, i: int):
        super().__init__()
        self.c, self.heads, self.kv_heads = c, c.num_query_heads[i], c.num_kv_heads[i]
        self.qkv_proj = nn.Linear(c.model_dim, (self.heads + 2 * self.kv_heads) * c.head_dim, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, eps=EPS) for _ in range(2))
        self.out_proj = nn.Linear(self.heads * c.head_dim, c.model_dim, bias=False)

    def forward(self, x):
        n, d = len(x), self.c.head_dim
        heads = self.qkv_proj(x).view(n, -1, d).transpose(0, 1)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads])
        q, k = (rotated(norm(heads), self.c.rope_freq_constant) for norm, heads in ((self.q_norm, q), (self.k_norm, k)))
        k, v = (heads.repeat_interleave(self.heads // self.kv_heads, dim=0) for heads in (k, v))
        unseen = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = (q @ k.mT / math.sqrt(d)).masked_fill(unseen, -torch.inf).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(0, 1).reshape(n, -1))


class Ffn(nn.Module):
    def __init__(self, c, i: int):
        super().__init__()
        divisor = c.ffn_dim_divisor
        width = int(c.ffn_multipliers[i] * c.model_dim + divisor / 2) // divisor * divisor
        self.proj_1 = nn.Linear(c.model_dim, 2 * width, bias=False)
        self.proj_2 = nn.Linear(width, c.model_dim, bias=False)

    def forward(self, x):
        gate, up = self.proj_1(x).chunk(2, dim=-1)
        return self.proj_2(F.silu(gate) * up)


def rotated(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotates the pairs (i, i + d / 2) of x (heads, n, d)."""
    _, n, d = x.shape
    angles = torch.outer(torch.arange(n).float(), base ** -(torch.arange(0, d, 2).float() / d))
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


CASES = [
    Case("openelm", OpenElm, CONFIG, dtype=BF16, embedding_std=0.15, means={"transformer.norm.weight": 3.0},
         blocks="numbers of heads and widths of MLPs that differ by layer; q, k, v in one matrix, gate and up in one, "
         "RMS norm of each q and k head, tied head",
         matters={"rope_freq_constant": 5000}),
]  # fmt: skip
