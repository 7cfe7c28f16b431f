"""Makes GGUF files in tests/fixtures/gguf from models in tests/fixtures/families whose tensors llama.cpp's converter
rearranges. The gguf package has the tensor names and writes the files; apart from it, only numpy is needed.

    python tests/oracle/make_family_gguf.py

Invariant: every number in a file comes from the fixture's weights or from its config.json.
"""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

FIXTURES = Path(__file__).parents[1] / "fixtures"
FAMILIES = FIXTURES / "families"

STORED = {"F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16}
# Always in F32, like norms and vectors.
SINGLE = ("ffn_gate_inp.", "_norm.weight")


class Model:
    """A fixture: its config.json, and its tensors in F32 with their stored type."""

    def __init__(self, name: str):
        folder = FAMILIES / name
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {}
        file = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", file)
        for tensor, entry in json.loads(file[8 : 8 + length]).items():
            if tensor != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                numbers = widened(file[begin:end], entry["dtype"]).reshape(entry["shape"])
                self.tensors[tensor] = (numbers, STORED[entry["dtype"]])

    def rows(self, part: str, arrange):
        """Reorders every tensor whose name contains `part`."""
        for name, (numbers, kind) in self.tensors.items():
            if part in name:
                self.tensors[name] = (arrange(numbers), kind)


def widened(raw: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def paired(heads: int):
    """Returns a function from halves to pairs: rows i and i + n/2 of a head become adjacent."""

    def arrange(rows: np.ndarray) -> np.ndarray:
        halves = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
        return halves.swapaxes(1, 2).reshape(rows.shape)

    return arrange


def in_blocks(groups: int, queries: int):
    """Returns a function from groups of queries, a key and a value to all queries, all keys, all values."""

    def arrange(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(groups, queries + 2, len(rows) // groups // (queries + 2), -1)
        parts = (heads[:, :queries], heads[:, queries : queries + 1], heads[:, queries + 1 :])
        return np.concatenate([part.reshape(-1, heads.shape[-1]) for part in parts]).reshape(rows.shape)

    return arrange


def phi3(writer: gguf.GGUFWriter, model: Model):
    config = model.config
    add_llama(writer, config)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"])


def mixtral(writer: gguf.GGUFWriter, model: Model):
    config = model.config
    add_llama(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    model.rows("q_proj", paired(config["num_attention_heads"]))
    model.rows("k_proj", paired(config["num_key_value_heads"]))
    for layer in range(config["num_hidden_layers"]):
        for matrix in ("w1", "w2", "w3"):
            names = [
                f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                for expert in range(config["num_local_experts"])
            ]
            each = [model.tensors.pop(name) for name in names]
            stacked = np.stack([numbers for numbers, _ in each])
            model.tensors[f"layers.{layer}.feed_forward.experts.{matrix}.weight"] = (stacked, each[0][1])


def add_llama(writer: gguf.GGUFWriter, config: dict):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def bloom(writer: gguf.GGUFWriter, model: Model):
    hidden, heads = model.config["n_embed"], model.config["num_attention_heads"]
    # The context length of the published models.
    writer.add_context_length(2048)
    add_plain(writer, hidden, heads, heads, model.config)
    model.rows("query_key_value", in_blocks(heads, 1))


def falcon(writer: gguf.GGUFWriter, model: Model):
    hidden, heads, groups = (model.config[key] for key in ("hidden_size", "num_attention_heads", "num_kv_heads"))
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    add_plain(writer, hidden, heads, groups, model.config)
    model.rows("query_key_value", in_blocks(groups, heads // groups))


def add_plain(writer: gguf.GGUFWriter, hidden: int, heads: int, kv_heads: int, config: dict):
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def t5(writer: gguf.GGUFWriter, model: Model):
    config = model.config
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_head_count(config["num_heads"])
    writer.add_key_length(config["d_kv"])
    writer.add_value_length(config["d_kv"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    writer.add_decoder_start_token_id(config["decoder_start_token_id"])


def make(name: str, arch: gguf.MODEL_ARCH, describe):
    model = Model(name)
    keys = ("num_hidden_layers", "n_layer", "num_layers")
    layers = next(model.config[key] for key in keys if key in model.config)
    writer = gguf.GGUFWriter(FIXTURES / "gguf" / f"{name}.gguf", gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(name)
    writer.add_block_count(layers)
    describe(writer, model)
    if arch != gguf.MODEL_ARCH.LLAMA:
        # There is no vocabulary from which the number of tokens follows.
        writer.add_vocab_size(model.config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_eos_token_id(model.config["eos_token_id"])
    add_tensors(writer, model, gguf.get_tensor_name_map(arch, layers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: gguf.GGUFWriter, model: Model, names: gguf.TensorNameMap):
    for hub, (numbers, kind) in model.tensors.items():
        name = names.get_name(hub, try_suffixes=(".weight", ".bias"))
        assert name is not None, hub
        if numbers.ndim == 1 or any(part in name for part in SINGLE):
            kind = Type.F32
        raw = gguf.quants.quantize(np.ascontiguousarray(numbers), kind)
        assert np.array_equal(gguf.quants.dequantize(raw, kind).reshape(numbers.shape), numbers), name
        writer.add_tensor(name, raw, raw_dtype=kind)


def main():
    make("phi3", gguf.MODEL_ARCH.PHI3, phi3)
    make("mixtral", gguf.MODEL_ARCH.LLAMA, mixtral)
    make("bloom", gguf.MODEL_ARCH.BLOOM, bloom)
    make("falcon_40b", gguf.MODEL_ARCH.FALCON, falcon)
    make("t5", gguf.MODEL_ARCH.T5, t5)


if __name__ == "__main__":
    main()
