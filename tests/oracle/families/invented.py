"""Two architectures that no published model has: blocks of many families in one, with their own tensor names and
keys.

`invented_one`: x + 0.7 attention(norm_a x) + 0.7 mlp(norm_m x), where norms are LayerNorm without bias. q and k are
RMS-normalized over all their heads at once; a score is 20 tanh(q.k / sqrt(d_k) / 20), minus the ALiBi slope times the
distance; layers 1, 3, ... attend to 8 tokens. The first MLP is dense, with quick_gelu and bias; in the others, the
two experts with the largest sigmoid score, weighted by score / sum of both * 1.5, are added to a shared one, all with
squared ReLU and without bias. Logits are half the product with the embedding.

`invented_two`: both stacks add post(f(pre x)) per block, where norms are RMS times 1 + weight, and also normalize
embeddings and results. The encoder's embedding is scaled by sqrt(d), and half of sin, cos, sin, cos, ... from
position 0 is added; the decoder rotates pairs (0, 1), (2, 3) of each head's first half. Only cross-attention has
biases. The MLP is down(gelu(gate x) * up x), and logits are 15 tanh(head x / 15).

Invariant: the parameters of a module have the names of the tensors in the files.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from .case import BF16, F16, Case
from .changes import slopes

ONE = {
    "act": "relu2",
    "act_first": "quick_gelu",
    "bos_token_id": 1,
    "ctx": 128,
    "d": 30,
    "d_expert": 20,
    "d_ff": 44,
    "d_k": 12,
    "d_shared": 28,
    "d_v": 8,
    "dense_layers": 1,
    "eos_token_id": 2,
    "eps": 1e-5,
    "experts": 4,
    "experts_used": 2,
    "heads": 6,
    "kv_heads": 3,
    "layers": 3,
    "logit_scale": 0.5,
    "model_type": "invented_one",
    "qk_eps": 1e-6,
    "residual_scale": 0.7,
    "route_scale": 1.5,
    "score_cap": 20.0,
    "vocab_size": 96,
    "window": 8,
}
TWO = {
    "bos_token_id": 1,
    "ctx": 64,
    "d": 32,
    "d_ff": 40,
    "dec_layers": 2,
    "decoder_start_token_id": 2,
    "enc_layers": 2,
    "eos_token_id": 2,
    "eps": 1e-6,
    "heads": 4,
    "is_encoder_decoder": True,
    "kv_heads": 2,
    "logit_cap": 15.0,
    "model_type": "invented_two",
    "rot": 4,
    "sinusoid_scale": 0.5,
    "theta": 500.0,
    "vocab_size": 97,
}


class Invented(nn.Module):
    """The methods that the scripts need for every reference."""

    def __init__(self, config: dict):
        super().__init__()
        self.c = SimpleNamespace(**config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head if hasattr(self, "head") else self.embed


class InventedOne(Invented):
    def __init__(self, config: dict):
        super().__init__(config)
        c = self.c
        self.embed = nn.Embedding(c.vocab_size, c.d)
        self.blocks = nn.ModuleList(OneBlock(c, i) for i in range(c.layers))
        self.norm = nn.LayerNorm(c.d, eps=c.eps, bias=False)

    def forward(self, input_ids, **_):
        x = self.embed(input_ids[0])
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=(self.norm(x) @ self.embed.weight.T * self.c.logit_scale)[None])


class OneBlock(nn.Module):
    def __init__(self, c, i: int):
        super().__init__()
        self.scale = c.residual_scale
        self.norm_a, self.norm_m = (nn.LayerNorm(c.d, eps=c.eps, bias=False) for _ in range(2))
        self.attn = OneAttention(c, window=c.window if i % 2 else c.ctx)
        self.mlp = Mlp(c.d, c.d_ff, c.act_first) if i < c.dense_layers else Mixture(c)

    def forward(self, x):
        return x + self.scale * self.attn(self.norm_a(x)) + self.scale * self.mlp(self.norm_m(x))


class OneAttention(nn.Module):
    def __init__(self, c, window: int):
        super().__init__()
        self.c, self.window = c, window
        self.q = nn.Linear(c.d, c.heads * c.d_k, bias=False)
        self.k = nn.Linear(c.d, c.kv_heads * c.d_k, bias=False)
        self.v = nn.Linear(c.d, c.kv_heads * c.d_v, bias=False)
        self.o = nn.Linear(c.heads * c.d_v, c.d, bias=False)
        self.q_norm = nn.RMSNorm(c.heads * c.d_k, eps=c.qk_eps)
        self.k_norm = nn.RMSNorm(c.kv_heads * c.d_k, eps=c.qk_eps)

    def forward(self, x):
        c, n = self.c, len(x)
        q = by_head(self.q_norm(self.q(x)), c.heads)
        k = by_head(self.k_norm(self.k(x)), c.kv_heads).repeat_interleave(c.heads // c.kv_heads, dim=0)
        v = by_head(self.v(x), c.kv_heads).repeat_interleave(c.heads // c.kv_heads, dim=0)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        scores = c.score_cap * torch.tanh(q @ k.mT / math.sqrt(c.d_k) / c.score_cap)
        scores = scores - slopes(c.heads)[:, None, None] * distance
        unseen = (distance < 0) | (distance >= self.window)
        return self.o(merged(scores.masked_fill(unseen, -torch.inf).softmax(dim=-1) @ v))


class Mlp(nn.Module):
    def __init__(self, d: int, width: int, act: str, bias: bool = True):
        super().__init__()
        self.up, self.down = nn.Linear(d, width, bias=bias), nn.Linear(width, d, bias=bias)
        self.act = {"relu2": lambda x: x.relu() ** 2, "quick_gelu": lambda x: x * (1.702 * x).sigmoid()}[act]

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.d, c.experts, bias=False)
        self.experts = nn.ModuleList(Mlp(c.d, c.d_expert, c.act, bias=False) for _ in range(c.experts))
        self.shared = Mlp(c.d, c.d_shared, c.act, bias=False)

    def forward(self, x):
        best, chosen = self.router(x).sigmoid().topk(self.c.experts_used, dim=-1)
        weights = best / best.sum(dim=-1, keepdim=True) * self.c.route_scale
        spread = torch.zeros(len(x), self.c.experts).scatter(1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)  # (n, experts, d)
        return (spread[:, :, None] * outputs).sum(dim=1) + self.shared(x)


class InventedTwo(Invented):
    def __init__(self, config: dict):
        super().__init__(config)
        c = self.c
        self.enc = Stack(c, c.enc_layers, decodes=False)
        self.dec = Stack(c, c.dec_layers, decodes=True)
        self.head = nn.Linear(c.d, c.vocab_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.dec.embed

    def forward(self, input_ids, decoder_input_ids, **_):
        source = self.enc.embed(input_ids[0]) * math.sqrt(self.c.d)
        source = self.enc(source + self.c.sinusoid_scale * sinusoids(*source.shape), None)
        x = self.dec(self.dec.embed(decoder_input_ids[0]), source)
        return SimpleNamespace(logits=(self.c.logit_cap * torch.tanh(self.head(x) / self.c.logit_cap))[None])


class Stack(nn.Module):
    def __init__(self, c, layers: int, decodes: bool):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d)
        self.embed_norm, self.norm = OffsetNorm(c), OffsetNorm(c)
        self.blocks = nn.ModuleList(TwoBlock(c, decodes) for _ in range(layers))

    def forward(self, x, source):
        x = self.embed_norm(x)
        for block in self.blocks:
            x = block(x, source)
        return self.norm(x)


class TwoBlock(nn.Module):
    def __init__(self, c, decodes: bool):
        super().__init__()
        self.self_pre, self.self_post, self.mlp_pre, self.mlp_post = (OffsetNorm(c) for _ in range(4))
        self.self_attn, self.mlp = TwoAttention(c, causal=decodes, bias=False), Gated(c)
        if decodes:
            self.cross_pre, self.cross_post = OffsetNorm(c), OffsetNorm(c)
            self.cross_attn = TwoAttention(c, causal=False, bias=True)

    def forward(self, x, source):
        y = self.self_pre(x)
        x = x + self.self_post(self.self_attn(y, y))
        if source is not None:
            x = x + self.cross_post(self.cross_attn(self.cross_pre(x), source))
        return x + self.mlp_post(self.mlp(self.mlp_pre(x)))


class TwoAttention(nn.Module):
    def __init__(self, c, causal: bool, bias: bool):
        super().__init__()
        self.c, self.causal, kv = c, causal, c.d // c.heads * c.kv_heads
        self.q, self.o = (nn.Linear(c.d, c.d, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(c.d, kv, bias=bias) for _ in range(2))

    def forward(self, x, source):
        c = self.c
        q, k, v = by_head(self.q(x), c.heads), *(by_head(f(source), c.kv_heads) for f in (self.k, self.v))
        if self.causal:
            q, k = (torch.cat([rotated(h[..., : c.rot], c.theta), h[..., c.rot :]], dim=-1) for h in (q, k))
        k, v = (h.repeat_interleave(c.heads // c.kv_heads, dim=0) for h in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return self.o(merged(scores.softmax(dim=-1) @ v))


class Gated(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate, self.up = (nn.Linear(c.d, c.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(c.d_ff, c.d, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class OffsetNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(c.d)), c.eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns (heads, n, width of a head)."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1)


def angles(n: int, d: int, theta: float) -> torch.Tensor:
    """Returns (n, d / 2)."""
    return torch.arange(n)[:, None] / theta ** (torch.arange(0, d, 2) / d)


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotates each pair of neighboring elements by the angle of its position."""
    turn = angles(x.shape[1], x.shape[2], theta)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turn.cos(), turn.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def sinusoids(n: int, d: int) -> torch.Tensor:
    turn = angles(n, d, 10000.0)
    return torch.stack([turn.sin(), turn.cos()], dim=-1).flatten(-2)


CASES = [
    Case("invented_one", InventedOne, ONE, dtype=F16, std=0.25, embedding_std=0.3,
         means={f"blocks.{i}.attn.{p}_norm.weight": 2.0 for i in range(3) for p in "qk"} | {"norm.weight": 5.0},
         blocks="LayerNorm without bias, parallel residual with two norms and a scale, ALiBi of 6 heads, q and k "
         "norms over their whole width, values narrower than keys, score softcap, a sliding window in layer 1, "
         "experts with sigmoid scores, a shared expert of another width, squared ReLU, a dense layer 0 with bias and "
         "quick_gelu, scaled tied logits",
         matters={"score_cap": 50.0, "window": 9, "residual_scale": 0.8, "logit_scale": 0.6, "route_scale": 1.0,
                  "experts_used": 3, "eps": 1e-2, "qk_eps": 1e-2, "act": "quick_gelu", "act_first": "relu2"}),
    Case("invented_two", InventedTwo, TWO, kind="encoder-decoder", dtype=BF16, starts=(2,), source_end=(2,),
         norm_mean=0.0, neutral=r"cross_attn\.k\.bias", std=0.25, head_gain=1.5,
         blocks="sandwich RMS norms with offset 1, embedding norms, scaled interleaved sinusoids, embedding scale "
         "in the encoder only, partial interleaved RoPE in the decoder, gated erf GELU, GQA, bias in cross-attention "
         "only, a head with bias, logit softcap",
         matters={"theta": 1000.0, "rot": 6, "sinusoid_scale": 0.6, "logit_cap": 20.0, "eps": 1e-2}),
]  # fmt: skip
