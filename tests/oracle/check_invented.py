"""Recomputes, with numpy only, the outputs of the two invented architectures in tests/fixtures/families.

    python tests/oracle/check_invented.py

Invariant: this script is written from the description at the head of families/invented.py, and shares no code with
the program below it.
"""

import json
import math

import numpy as np
from check_numpy import read_safetensors
from numpy_decoder import (
    FIXTURES,
    NOTICED,
    TOLERANCE,
    alibi_slopes,
    log_softmax,
    softmax,
    split,
    worst_difference,
)


def linear(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def one(w: dict, c: dict, ids: list[int]) -> np.ndarray:
    x = w["embed.weight"][ids]
    for i in range(c["layers"]):
        at = f"blocks.{i}"
        a = one_attention(w, c, i, layer_norm(w, c, f"{at}.norm_a", x))
        m = one_mlp(w, c, i, layer_norm(w, c, f"{at}.norm_m", x))
        x = x + c["residual_scale"] * (a + m)
    return log_softmax(layer_norm(w, c, "norm", x) @ w["embed.weight"].T * c["logit_scale"])


def layer_norm(w: dict, c: dict, name: str, x: np.ndarray) -> np.ndarray:
    return rms(x - x.mean(axis=-1, keepdims=True), w[f"{name}.weight"], c["eps"])


def one_attention(w: dict, c: dict, i: int, x: np.ndarray) -> np.ndarray:
    at, n = f"blocks.{i}.attn", len(x)
    q, k = (rms(linear(w, f"{at}.{p}", x), w[f"{at}.{p}_norm.weight"], c["qk_eps"]) for p in "qk")
    q, k, v = split(q, c["d_k"]), split(k, c["d_k"]), split(linear(w, f"{at}.v", x), c["d_v"])
    out = np.zeros((n, c["heads"], c["d_v"]))
    for h, slope in enumerate(alibi_slopes(c["heads"])):
        kv = h * c["kv_heads"] // c["heads"]
        for t in range(n):
            seen = np.arange(max(0, t - c["window"] + 1) if i % 2 else 0, t + 1)
            scores = k[kv, seen] @ q[h, t] / math.sqrt(c["d_k"])
            scores = c["score_cap"] * np.tanh(scores / c["score_cap"]) - slope * (t - seen)
            out[t, h] = softmax(scores) @ v[kv, seen]
    return linear(w, f"{at}.o", out.reshape(n, -1))


def one_mlp(w: dict, c: dict, i: int, x: np.ndarray) -> np.ndarray:
    at = f"blocks.{i}.mlp"

    def squared(name: str, x: np.ndarray) -> np.ndarray:
        return linear(w, f"{name}.down", np.maximum(linear(w, f"{name}.up", x), 0) ** 2)

    if i == 0:
        up = linear(w, f"{at}.up", x)
        return linear(w, f"{at}.down", up / (1 + np.exp(-1.702 * up)))
    out = squared(f"{at}.shared", x)
    for t, scores in enumerate(1 / (1 + np.exp(-linear(w, f"{at}.router", x)))):
        best = np.argsort(-scores)[: c["experts_used"]]
        for j in best:
            share = scores[j] / scores[best].sum() * c["route_scale"]
            out[t] += share * squared(f"{at}.experts.{j}", x[t])
    return out


def two(w: dict, c: dict, source: list[int], ids: list[int]) -> np.ndarray:
    d = c["d"]
    places = np.zeros((len(source), d))
    for j in range(d // 2):
        angle = np.arange(len(source)) / 10000 ** (2 * j / d)
        places[:, 2 * j], places[:, 2 * j + 1] = np.sin(angle), np.cos(angle)
    memory = stack(
        w, c, "enc", w["enc.embed.weight"][source] * math.sqrt(d) + c["sinusoid_scale"] * places, None
    )
    x = stack(w, c, "dec", w["dec.embed.weight"][ids], memory)
    return log_softmax(c["logit_cap"] * np.tanh(linear(w, "head", x) / c["logit_cap"]))


def stack(w: dict, c: dict, name: str, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
    def norm(part: str, x: np.ndarray) -> np.ndarray:
        return rms(x, 1 + w[f"{name}.{part}.weight"], c["eps"])

    x = norm("embed_norm", x)
    for i in range(c[f"{name}_layers"]):
        at = f"blocks.{i}"
        y = norm(f"{at}.self_pre", x)
        x = x + norm(
            f"{at}.self_post", two_attention(w, c, f"{name}.{at}.self_attn", y, y, causal=memory is not None)
        )
        if memory is not None:
            y = norm(f"{at}.cross_pre", x)
            y = two_attention(w, c, f"{name}.{at}.cross_attn", y, memory, causal=False)
            x = x + norm(f"{at}.cross_post", y)
        y = norm(f"{at}.mlp_pre", x)
        gate = linear(w, f"{name}.{at}.mlp.gate", y)
        gate = gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) / 2
        y = linear(w, f"{name}.{at}.mlp.down", gate * linear(w, f"{name}.{at}.mlp.up", y))
        x = x + norm(f"{at}.mlp_post", y)
    return norm("norm", x)


def two_attention(w: dict, c: dict, name: str, x: np.ndarray, seen: np.ndarray, causal: bool) -> np.ndarray:
    head_dim = c["d"] // c["heads"]
    q, k, v = (
        split(linear(w, f"{name}.{p}", y), head_dim) for p, y in zip("qkv", (x, seen, seen), strict=True)
    )
    if causal:
        q, k = turned(c, q), turned(c, k)
    k, v = (np.repeat(part, c["heads"] // c["kv_heads"], axis=0) for part in (k, v))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(head_dim)
    if causal:
        scores = np.where(np.subtract.outer(np.arange(len(x)), np.arange(len(x))) < 0, -np.inf, scores)
    return linear(w, f"{name}.o", (softmax(scores) @ v).swapaxes(0, 1).reshape(len(x), -1))


def turned(c: dict, x: np.ndarray) -> np.ndarray:
    """Rotates pairs of neighboring elements, as complex numbers times those of the angles."""
    angle = np.arange(x.shape[1])[:, None] / c["theta"] ** (np.arange(0, c["rot"], 2) / c["rot"])
    first = x[..., : c["rot"] : 2] + 1j * x[..., 1 : c["rot"] : 2]
    first = first * np.exp(1j * angle)
    out = x.copy()
    out[..., : c["rot"] : 2], out[..., 1 : c["rot"] : 2] = first.real, first.imag
    return out


def check(name: str, run, wrong: dict):
    folder = FIXTURES / name
    weights = read_safetensors(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    right, noticed = (
        worst_difference(lambda e, c=c: run(weights, c, e), folder) for c in (config, config | wrong)
    )
    line = f"{name:18} worst difference {right:.1e}, with one thing wrong {noticed:.1e}"
    assert right < TOLERANCE and noticed > NOTICED, line
    print(line)


def main():
    check("invented_one", lambda w, c, e: one(w, c, e["prompt"] + e["answer"]), {"window": 9})
    check("invented_two", lambda w, c, e: two(w, c, e["source"], e["prompt"] + e["answer"]), {"rot": 6})


if __name__ == "__main__":
    main()
