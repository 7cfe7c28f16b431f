"""A decoder in numpy, from formulas, in float64, with which the scripts describe the families whose fixtures they
check.

Invariant: no code is shared with the scripts that make the fixtures, or with the library that computes their outputs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "families"
TOLERANCE = 1e-4
NOTICED = 2e-3


@dataclass(frozen=True)
class Layer:
    """One decoder layer, with matrices as (out, in). `mlp` is the whole feed-forward network, including experts."""

    norms: tuple  # (weight, bias) of the norms before attention and before the MLP
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    biases: dict
    mlp: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Decoder:
    """A pre-norm decoder with the parameters in which families differ."""

    layers: list[Layer]
    embedding: np.ndarray
    norm: tuple
    head: np.ndarray
    heads: int
    eps: float
    layer_norm: bool = False  # otherwise RMS norm
    theta: float = 10000.0
    rotated: int | None = None  # rotated columns of a head; None: all
    interleaved: bool = False
    alibi: float = 0.0  # factor of the slopes; if not 0, there is no rotation
    embedding_norm: tuple | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0


def forward(d: Decoder, ids: list[int]) -> np.ndarray:
    x = d.embedding[ids] * d.embedding_scale
    if d.embedding_norm:
        x = norm(d, d.embedding_norm, x)
    for layer in d.layers:
        x = x + d.residual_scale * attention(d, layer, norm(d, layer.norms[0], x))
        x = x + d.residual_scale * layer.mlp(norm(d, layer.norms[1], x))
    return log_softmax(norm(d, d.norm, x) @ d.head.T * d.logit_scale)


def norm(d: Decoder, weights: tuple, x: np.ndarray) -> np.ndarray:
    weight, bias = weights
    if d.layer_norm:
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + d.eps) * weight + bias


def attention(d: Decoder, layer: Layer, x: np.ndarray) -> np.ndarray:
    head_dim = len(layer.q) // d.heads
    q, k, v = (split(x @ getattr(layer, p).T + layer.biases.get(p, 0.0), head_dim) for p in "qkv")
    if not d.alibi:
        q, k = turned(d, q), turned(d, k)
    k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(head_dim)
    distance = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
    if d.alibi:
        scores = scores - d.alibi * np.array(alibi_slopes(d.heads))[:, None, None] * distance
    out = softmax(np.where(distance < 0, -np.inf, scores)) @ v
    return out.swapaxes(0, 1).reshape(len(x), -1) @ layer.o.T + layer.biases.get("o", 0.0)


def split(x: np.ndarray, head_dim: int) -> np.ndarray:
    return x.reshape(len(x), -1, head_dim).swapaxes(0, 1)


def turned(d: Decoder, x: np.ndarray) -> np.ndarray:
    columns = d.rotated or x.shape[-1]
    angle = np.arange(x.shape[1])[:, None] * d.theta ** (-np.arange(0, columns, 2) / columns)
    pairs = [(2 * j, 2 * j + 1) if d.interleaved else (j, j + columns // 2) for j in range(columns // 2)]
    out = x.copy()
    for j, (a, b) in enumerate(pairs):
        cos, sin = np.cos(angle[:, j]), np.sin(angle[:, j])
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return out


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slopes as in Baichuan's code: those of a power of two, plus every second one of twice that power."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(np.log2(n) - 3)))
        return [start ** (k + 1) for k in range(n)]

    power = 2 ** int(np.log2(heads))
    return of_power(power) + of_power(2 * power)[0::2][: heads - power]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> Callable:
    return lambda x: (silu(x @ gate.T) * (x @ up.T)) @ down.T


def worst_difference(run: Callable[[dict], np.ndarray], folder: Path) -> float:
    """Returns the largest difference of any recorded log-probability."""
    worst = 0.0
    for entry in json.loads((folder / "answers.json").read_text())["answers"]:
        ids, start = entry["prompt"] + entry["answer"], len(entry["prompt"])
        table = run(entry)[:-1]
        recorded = np.array(entry["prompt_logprobs"] + entry["answer_logprobs"])
        worst = max(worst, np.abs(table[np.arange(len(ids) - 1), ids[1:]] - recorded).max())
        top = np.take_along_axis(table[start - 1 :], np.array(entry["top5_ids"]), axis=1)
        worst = max(worst, np.abs(top - np.array(entry["top5_logprobs"])).max())
    return worst
