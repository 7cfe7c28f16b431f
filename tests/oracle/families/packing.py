"""Tensor layouts of families that fuse several matrices of the borrowed class."""

import torch

from .case import Tensors

CHATGLM_NAMES = (
    (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
    (r"^model\.layers", "transformer.encoder.layers"),
    (r"^model\.norm", "transformer.encoder.final_layernorm"),
    (r"^lm_head", "transformer.output_layer"),
    (r"self_attn\.o_proj", "self_attention.dense"),
    (r"self_attn", "self_attention"),
    (r"gate_up_proj", "dense_h_to_4h"),
    (r"down_proj", "dense_4h_to_h"),
)
INTERNLM2_NAMES = (
    (r"^model\.embed_tokens", "model.tok_embeddings"),
    (r"^lm_head", "output"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"self_attn", "attention"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
)


def w_pack(tensors: Tensors, config: dict) -> Tensors:
    """Concatenates q, k and v: (3 * hidden, hidden)."""
    return joined(tensors, "W_pack", lambda q, k, v: torch.cat([q, k, v]))


def chatglm(tensors: Tensors, config: dict) -> Tensors:
    """Concatenates q, k and v, weights and biases, with different numbers of rows."""
    return joined(tensors, "query_key_value", lambda q, k, v: torch.cat([q, k, v]))


def wqkv(tensors: Tensors, config: dict) -> Tensors:
    """Concatenates, for each KV head, its query heads, k and v."""
    groups = config["num_key_value_heads"]

    def interleaved(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    return joined(tensors, "wqkv", interleaved)


def joined(tensors: Tensors, name: str, join) -> Tensors:
    """Replaces q, k and v of every layer by one tensor called `name`."""
    out = {}
    for key, tensor in tensors.items():
        if ".q_proj." in key:
            parts = [tensors[key.replace(".q_proj.", f".{p}_proj.")] for p in "qkv"]
            out[key.replace("q_proj", name)] = join(*parts)
        elif ".k_proj." not in key and ".v_proj." not in key:
            out[key] = tensor
    return out
