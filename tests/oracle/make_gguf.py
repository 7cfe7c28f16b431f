"""Makes tests/fixtures/gguf: GGUF files of models from tests/fixtures, written with the gguf package like llama.cpp's
converter does, and the outputs of Hugging Face transformers for the weights of those that are stored in blocks.

    python tests/oracle/make_gguf.py

Invariant: the recorded outputs are computed in float32 from the dequantized blocks of the file, and not from the
original weights.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import make_family_gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from make_fixtures import (
    FIXTURES,
    HUB_FIXTURES,
    MARGIN,
    answers,
    check_generate,
    record_all,
    report,
    write_json,
)
from llama2c import interleave
from transformers import LlamaForCausalLM
from transformers.utils import logging

FOLDER = FIXTURES / "gguf"
SEED = 5

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Made:
    """A file to make from a fixture. `around` is the type of embedding and head, `within` that of the other
    matrices."""

    name: str
    fixture: str
    around: Type
    within: Type
    tied: bool = False
    vocab_size_key: bool = True

    def type_of(self, name: str) -> Type:
        if "norm" in name:
            return Type.F32
        return self.around if name in ("model.embed_tokens.weight", "lm_head.weight") else self.within

    def in_blocks(self) -> bool:
        return self.within in (Type.Q8_0, Type.Q4_0)


MADE = [
    # RoPE frequency factors as a tensor; two end tokens.
    Made("f32", "rope_llama3", Type.F32, Type.F32),
    # Its numbers have 8 significant bits, which F16 represents exactly.
    Made("f16", "bf16", Type.BF16, Type.F16),
    Made("q8_0", "f16", Type.Q8_0, Type.Q8_0),
    Made("q4_0", "f16", Type.Q4_0, Type.Q4_0, tied=True, vocab_size_key=False),
]


def gguf_name(name: str) -> str:
    """Returns a tensor's name in GGUF; the layer number stays."""
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def encoded(values: np.ndarray, kind: Type) -> np.ndarray:
    """Returns the bytes of a tensor, or its numbers if the writer encodes them itself."""
    if kind in (Type.F32, Type.F16):
        narrow = values.astype(np.float32 if kind == Type.F32 else np.float16)
        assert np.array_equal(narrow.astype(np.float32), values)
        return narrow
    return quants.quantize(values, kind)


def stored(model: LlamaForCausalLM, made: Made) -> LlamaForCausalLM:
    """Returns the model with the numbers that the file's types can represent. With block formats, the logits are
    scaled up for clear answers."""
    model.config.tie_word_embeddings = made.tied
    if made.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        if made.in_blocks():
            model.model.norm.weight.mul_(2.0)
        for name, weight in model.named_parameters():
            kind, values = made.type_of(name), weight.numpy()
            held = quants.dequantize(encoded(values, kind), kind).reshape(values.shape)
            weight.copy_(torch.from_numpy(held.astype(np.float32)))
    return model


def rope_factors(config) -> np.ndarray | None:
    """Returns the divisor of each RoPE frequency, as llama.cpp's converter computes it for the llama3 rule."""
    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    waves = 2 * np.pi / frequencies
    smooth = (context / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    chosen = np.where(waves < context / high, 1.0, np.where(waves > context / low, factor, between))
    return chosen.astype(np.float32)


def add_settings(writer: gguf.GGUFWriter, config, eos: tuple[int, ...], made: Made):
    writer.add_name(made.name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if made.vocab_size_key:
        writer.add_vocab_size(config.vocab_size)
    if made.in_blocks():
        writer.add_quantization_version(2)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(eos[0])
    for other in eos[1:]:
        writer.add_eot_token_id(other)


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path):
    """Adds the fixture's tokenizer.json as GGUF keys."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {token["content"] for token in content["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_add_bos_token(True)


def write(model: LlamaForCausalLM, made: Made, eos: tuple[int, ...]):
    writer = gguf.GGUFWriter(FOLDER / f"{made.name}.gguf", "llama")
    add_settings(writer, model.config, eos, made)
    add_vocabulary(writer, FIXTURES / made.fixture)
    factors = rope_factors(model.config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleave(values, model.config.head_dim)
        kind = made.type_of(name)
        raw = None if kind in (Type.F32, Type.F16) else kind
        writer.add_tensor(gguf_name(name), encoded(values, kind), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(made: Made):
    fixture = next(f for f in HUB_FIXTURES if f.name == made.fixture)
    read = LlamaForCausalLM.from_pretrained
    model = read(FIXTURES / fixture.name, dtype=torch.float32, attn_implementation="eager").eval()
    model = stored(model, made)
    write(model, made, fixture.eos)
    if not made.in_blocks():
        return
    entries = record_all(model, fixture)
    assert all(entry["margin"] >= MARGIN for entry in entries), [entry["margin"] for entry in entries]
    check_generate(model, entries)
    recorded = json.loads((FIXTURES / fixture.name / "answers.json").read_text())
    write_json(FOLDER / f"{made.name}.json", answers(fixture, recorded["seed"], entries))
    report(made.name, recorded["seed"], FOLDER, entries)


def make_blocks():
    """Writes numbers and their blocks: random blocks of all magnitudes, and blocks at the decision points of the
    rounding."""
    random = np.random.default_rng(SEED)
    rows = [random.standard_normal(32) * 10.0**power for power in (-6, -3, -1, 0, 2, 4)]
    zeros, ends, halves = np.zeros(32), np.zeros(32), (np.arange(32) - 16) / 2.0
    ends[[3, 4, 20]] = [-5.0, 5.0, 2.5]
    halves[0] = 127.0
    around_zero = np.where(np.arange(32) == 16, -8.0, halves)
    around_zero[0] = 7.5
    rows += [zeros, ends, -ends, halves, -halves, np.full(32, 1e-7), random.integers(-8, 8, 32).astype(float)]
    rows += [around_zero, -around_zero]
    values = np.stack(rows).astype(np.float32)
    codes = {
        kind.name.lower(): [row.tobytes().hex() for row in quants.quantize(values, kind)]
        for kind in (Type.Q8_0, Type.Q4_0)
    }
    write_json(FOLDER / "blocks.json", {"values": values.view(np.uint32).tolist()} | codes)


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for made in MADE:
        make(made)
    make_blocks()
    make_family_gguf.main()


if __name__ == "__main__":
    main()
