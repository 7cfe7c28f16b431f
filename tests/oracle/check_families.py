"""Recomputes, from formulas and with numpy only, the outputs of family fixtures: all families for which transformers
has no class, and those with ALiBi.

    python tests/oracle/check_families.py

Each family is described independently: the layout of its files, and its blocks. Every description is also run with
one deliberate error, which must change the outputs: so the fixture distinguishes a correct engine from an incorrect
one.

Invariant: no code is shared with the scripts that made the fixtures, or with the library that computed the outputs.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from check_numpy import read_safetensors
from numpy_decoder import (
    FIXTURES,
    NOTICED,
    TOLERANCE,
    Decoder,
    Layer,
    forward,
    gated,
    softmax,
    worst_difference,
)


def llama(w: dict, c: dict) -> Decoder:
    """A decoder with Llama's tensor names and blocks, and with all biases in the file."""
    layers = []
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        qkv = [w[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"] if f"{at}.self_attn.q_proj.weight" in w else (
            np.split(w[f"{at}.self_attn.W_pack.weight"], 3)
        )  # fmt: skip
        biases = {p: w.get(f"{at}.self_attn.{p}_proj.bias", 0.0) for p in "qkvo"}
        norms = tuple(pair(w, f"{at}.{n}_layernorm") for n in ("input", "post_attention"))
        layers.append(Layer(norms, *qkv, w[f"{at}.self_attn.o_proj.weight"], biases, llama_mlp(w, c, i)))
    embedding = w["model.embed_tokens.weight"]
    head = w.get("lm_head.weight", embedding)
    return Decoder(
        layers, embedding, pair(w, "model.norm"), head, c["num_attention_heads"], c["rms_norm_eps"]
    )


def pair(w: dict, name: str) -> tuple:
    return w[f"{name}.weight"], w.get(f"{name}.bias", 0.0)


def llama_mlp(w: dict, c: dict, i: int) -> Callable:
    at = f"model.layers.{i}.mlp"
    if f"{at}.gate.weight" in w:
        return deepseek_mlp(w, c, at)
    return gated(*(w[f"{at}.{p}_proj.weight"] for p in ("gate", "up", "down")))


def deepseek_mlp(w: dict, c: dict, at: str) -> Callable:
    """Softmax over all experts, the top ones without renormalization, and the shared experts."""

    def expert(name: str) -> Callable:
        return gated(*(w[f"{at}.{name}.{p}_proj.weight"] for p in ("gate", "up", "down")))

    experts = [expert(f"experts.{j}") for j in range(c["n_routed_experts"])]
    shared = expert("shared_experts")

    def mlp(x: np.ndarray) -> np.ndarray:
        scores = softmax(x @ w[f"{at}.gate.weight"].T)
        out = shared(x)
        for n, row in enumerate(scores):
            best = np.argsort(-row)[: c["num_experts_per_tok"]]
            total = row[best].sum() if c["norm_topk_prob"] else 1.0
            out[n] += sum(row[j] / total * experts[j](x[n]) for j in best)
        return out

    return mlp


def baichuan(w: dict, c: dict) -> Decoder:
    d = replace(llama(w, c), alibi=0.0 if "max_position_embeddings" in c else 1.0)
    return replace(d, head=unit_rows(d.head)) if "z_loss_weight" in c else d


def unit_rows(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=1, keepdims=True))


def chatglm(w: dict, c: dict) -> Decoder:
    width, group = c["num_attention_heads"] * c["kv_channels"], c["multi_query_group_num"] * c["kv_channels"]
    layers = []
    for i in range(c["num_layers"]):
        at = f"transformer.encoder.layers.{i}"
        cuts = [width, width + group]
        qkv = np.split(w[f"{at}.self_attention.query_key_value.weight"], cuts)
        biases = dict(zip("qkv", np.split(w[f"{at}.self_attention.query_key_value.bias"], cuts), strict=True))
        gate, up = np.split(w[f"{at}.mlp.dense_h_to_4h.weight"], 2)
        norms = tuple(pair(w, f"{at}.{n}_layernorm") for n in ("input", "post_attention"))
        mlp = gated(gate, up, w[f"{at}.mlp.dense_4h_to_h.weight"])
        layers.append(Layer(norms, *qkv, w[f"{at}.self_attention.dense.weight"], biases, mlp))
    return Decoder(
        layers,
        w["transformer.embedding.word_embeddings.weight"],
        pair(w, "transformer.encoder.final_layernorm"),
        w["transformer.output_layer.weight"],
        c["num_attention_heads"],
        c["layernorm_epsilon"],
        rotated=c["kv_channels"] // 2,
        interleaved=True,
    )


def internlm2(w: dict, c: dict) -> Decoder:
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    layers = []
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        groups = w[f"{at}.attention.wqkv.weight"].reshape(
            c["num_key_value_heads"], -1, head_dim, c["hidden_size"]
        )
        qkv = [part.reshape(-1, c["hidden_size"]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])]
        norms = (pair(w, f"{at}.attention_norm"), pair(w, f"{at}.ffn_norm"))
        mlp = gated(*(w[f"{at}.feed_forward.w{n}.weight"] for n in (1, 3, 2)))
        layers.append(Layer(norms, *qkv, w[f"{at}.attention.wo.weight"], {}, mlp))
    embedding, head = w["model.tok_embeddings.weight"], w["output.weight"]
    d = Decoder(layers, embedding, pair(w, "model.norm"), head, c["num_attention_heads"], c["rms_norm_eps"])
    return replace(d, theta=c["rope_theta"])


def minicpm(w: dict, c: dict) -> Decoder:
    return replace(
        llama(w, c),
        embedding_scale=c["scale_emb"],
        residual_scale=c["scale_depth"] / np.sqrt(c["num_hidden_layers"]),
        logit_scale=c["dim_model_base"] / c["hidden_size"],
    )


def orion(w: dict, c: dict) -> Decoder:
    return replace(llama(w, c), layer_norm=True)


def without_shared(w: dict, c: dict) -> Decoder:
    return llama({name: t * 0 if "shared" in name else t for name, t in w.items()}, c)


def bloom(w: dict, c: dict) -> Decoder:
    """A decoder with Bloom's tensor names, which Falcon uses too, with or without a prefix."""
    w = {name.removeprefix("transformer."): t for name, t in w.items()}
    heads = c.get("n_head") or c["num_attention_heads"]
    hidden, layers = c.get("n_embed") or c["hidden_size"], c.get("n_layer") or c["num_hidden_layers"]
    embedding = w["word_embeddings.weight"]
    return Decoder(
        [bloom_layer(w, f"h.{i}", heads, hidden) for i in range(layers)],
        embedding,
        pair(w, "ln_f"),
        embedding,
        heads,
        c["layer_norm_epsilon"],
        layer_norm=True,
        alibi=1.0,
        embedding_norm=pair(w, "word_embeddings_layernorm")
        if "word_embeddings_layernorm.weight" in w
        else None,
    )


def bloom_layer(w: dict, at: str, heads: int, hidden: int) -> Layer:
    """A layer with q, k and v interleaved per head; tanh GELU, or erf GELU for Falcon, which has no embedding norm."""
    fused, bias = pair(w, f"{at}.self_attention.query_key_value")
    qkv = fused.reshape(heads, 3, -1, hidden).swapaxes(0, 1).reshape(3, hidden, hidden)
    biases = dict(zip("qkv", bias.reshape(heads, 3, -1).swapaxes(0, 1).reshape(3, hidden), strict=True))
    o, biases["o"] = pair(w, f"{at}.self_attention.dense")
    up, up_bias = pair(w, f"{at}.mlp.dense_h_to_4h")
    down, down_bias = pair(w, f"{at}.mlp.dense_4h_to_h")
    gelu = gelu_tanh if "word_embeddings_layernorm.weight" in w else gelu_erf
    norms = (pair(w, f"{at}.input_layernorm"), pair(w, f"{at}.post_attention_layernorm"))
    return Layer(norms, *qkv, o, biases, lambda x: gelu(x @ up.T + up_bias) @ down.T + down_bias)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def gelu_erf(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def falcon_rw(w: dict, c: dict) -> Decoder:
    """The slopes are divided by the square root of the head size, like the scores."""
    return replace(bloom(w, c), alibi=(c["hidden_size"] / c["num_attention_heads"]) ** -0.5)


# For each fixture: its description, and one with an error.
DECODERS = {
    "baichuan_7b": (baichuan, lambda w, c: replace(baichuan(w, c), interleaved=True)),
    "baichuan_13b": (baichuan, lambda w, c: replace(baichuan(w, c), alibi=0.0)),
    "baichuan2": (baichuan, llama),
    "baichuan2_13b": (baichuan, lambda w, c: replace(llama(w, c), alibi=1.0)),
    "chatglm2": (chatglm, lambda w, c: replace(chatglm(w, c), rotated=c["kv_channels"])),
    "internlm": (
        llama,
        lambda w, c: llama({name: t for name, t in w.items() if "o_proj.bias" not in name}, c),
    ),
    "internlm2": (internlm2, lambda w, c: replace(internlm2(w, c), theta=10000.0)),
    "deepseek_moe": (llama, without_shared),
    "minicpm": (minicpm, lambda w, c: replace(minicpm(w, c), residual_scale=0.25)),
    "orion": (orion, llama),
    "bloom": (bloom, lambda w, c: replace(bloom(w, c), alibi=0.5)),
    "bloom_heads6": (bloom, lambda w, c: replace(bloom(w, c), embedding_norm=None)),
    "falcon_rw": (falcon_rw, bloom),
    "xverse": (llama, lambda w, c: replace(llama(w, c), theta=20000.0)),
}


def worst_of_decoder(decoder: Decoder, folder: Path) -> float:
    return worst_difference(lambda entry: forward(decoder, entry["prompt"] + entry["answer"]), folder)


def main():
    for name, (right, wrong) in DECODERS.items():
        folder = FIXTURES / name
        weights = read_safetensors(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        worst = worst_of_decoder(right(weights, config), folder)
        noticed = worst_of_decoder(wrong(weights, config), folder)
        line = f"{name:18} worst difference {worst:.1e}, with an error {noticed:.1e}"
        assert worst < TOLERANCE and noticed > NOTICED, line
        print(line)


if __name__ == "__main__":
    main()
