"""Tensors in the files of families that no computation needs: masks, tables, heads of another training task.

Invariant: none of them is a weight of the reference, and none differs between runs.
"""

import torch

from .case import Tensors
from .rope import inverse_frequencies


def gpt2_masks(config: dict) -> Tensors:
    return {f"h.{i}.attn.bias": causal(config["n_ctx"], torch.float32) for i in range(config["n_layer"])}


def gptj_masks(config: dict) -> Tensors:
    tensors = {}
    for i in range(config["n_layer"]):
        tensors[f"transformer.h.{i}.attn.bias"] = causal(config["n_positions"], torch.uint8)
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e9)
    return tensors


def codegen_masks(config: dict) -> Tensors:
    mask = causal(config["n_ctx"], torch.uint8)
    return {f"transformer.h.{i}.attn.causal_mask": mask.clone() for i in range(config["n_layer"])}


def neox_masks(config: dict) -> Tensors:
    rotated = int(config["hidden_size"] // config["num_attention_heads"] * config["rotary_pct"])
    tensors = {}
    for i in range(config["num_hidden_layers"]):
        name = f"gpt_neox.layers.{i}.attention"
        tensors[f"{name}.bias"] = causal(config["max_position_embeddings"], torch.bool)
        tensors[f"{name}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{name}.rotary_emb.inv_freq"] = inverse_frequencies(config["rotary_emb_base"], rotated)
    return tensors


def rotary_tables(config: dict) -> Tensors:
    """Returns the frequencies, once per layer, as in files from the time of the first Llama."""
    table = inverse_frequencies(10000.0, config["hidden_size"] // config["num_attention_heads"])
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": table.clone() for i in layers}


def chatglm_table(config: dict) -> Tensors:
    return {"transformer.rotary_pos_emb.inv_freq": inverse_frequencies(10000.0, config["kv_channels"] // 2)}


def bert_pretraining(config: dict) -> Tensors:
    """Returns the pooler, the next-sentence head and the buffer of positions."""
    random, hidden = torch.Generator().manual_seed(0), config["hidden_size"]
    return {
        "bert.embeddings.position_ids": torch.arange(config["max_position_embeddings"])[None],
        "bert.pooler.dense.weight": torch.randn(hidden, hidden, generator=random),
        "bert.pooler.dense.bias": torch.randn(hidden, generator=random),
        "cls.seq_relationship.weight": torch.randn(2, hidden, generator=random),
        "cls.seq_relationship.bias": torch.randn(2, generator=random),
    }


def deberta_discriminator(config: dict) -> Tensors:
    """Returns a part of the head that tells replaced tokens."""
    random, hidden = torch.Generator().manual_seed(0), config["hidden_size"]
    return {"mask_predictions.classifier.weight": torch.randn(1, hidden, generator=random)}


def roberta_positions(config: dict) -> Tensors:
    return {"roberta.embeddings.position_ids": torch.arange(config["max_position_embeddings"])[None]}


def t5_cross_table(config: dict) -> Tensors:
    """Returns a table in the files of the first T5 that no version of its code reads."""
    shape = (config["relative_attention_num_buckets"], config["num_heads"])
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0))}


def causal(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(n, n).tril()[None, None].to(dtype)
