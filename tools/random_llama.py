"""Writes a Llama model of a named shape with random weights, for benchmarks: as a hub folder, as GGUF, or both.

    python tools/random_llama.py --shape 110M --dtype f16 --out models/110M --gguf models/110M-f16.gguf

Needs numpy, and the gguf package for --gguf. Tensors are generated and written one at a time, so memory usage stays
at about one tensor. Weights are scaled by their fan-in and residual branches by depth, so that activations stay near
unit size.

Invariant: a tensor depends only on the seed and its place in the table, so both files contain the same numbers.
"""

import argparse
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import byte_bpe

BOS, EOS = 1, 2
SPECIALS = ["<unk>", "<s>", "</s>"]
NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 32000
    context: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# Named by the usual parameter counts. That of 110M assumes a tied head; here, neither model has one.
SHAPES = {
    "1.1B": Shape(hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632),
    "110M": Shape(hidden=768, layers=12, heads=12, kv_heads=12, ffn=2048),
}


@dataclass(frozen=True)
class Tensor:
    """One weight: its name in each format, its shape (outputs, inputs), and the standard deviation of its numbers."""

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    std: float | None  # None: a norm, with all weights 1
    rope_heads: int | None = None  # for q and k: the number of heads, whose rows are interleaved in GGUF


def tensors(shape: Shape) -> list[Tensor]:
    """Returns every weight of the model, in the order of both files."""
    vocab, hidden = shape.vocab, shape.hidden
    return [
        Tensor("model.embed_tokens.weight", "token_embd.weight", (vocab, hidden), 1.0),
        *(tensor for i in range(shape.layers) for tensor in layer_tensors(shape, i)),
        Tensor("model.norm.weight", "output_norm.weight", (hidden,), None),
        Tensor("lm_head.weight", "output.weight", (vocab, hidden), 2.0 * hidden**-0.5),
    ]


def layer_tensors(shape: Shape, i: int) -> list[Tensor]:
    hidden, ffn, kv = shape.hidden, shape.ffn, shape.kv_heads * shape.head_dim
    residual = (2 * shape.layers) ** -0.5

    def norm(name, gguf_name):
        return Tensor(f"model.layers.{i}.{name}.weight", f"blk.{i}.{gguf_name}.weight", (hidden,), None)

    def linear(name, gguf_name, outputs, inputs, gain=1.0, rope_heads=None):
        names = (f"model.layers.{i}.{name}.weight", f"blk.{i}.{gguf_name}.weight")
        return Tensor(*names, (outputs, inputs), gain * inputs**-0.5, rope_heads)

    return [
        norm("input_layernorm", "attn_norm"),
        linear("self_attn.q_proj", "attn_q", hidden, hidden, rope_heads=shape.heads),
        linear("self_attn.k_proj", "attn_k", kv, hidden, rope_heads=shape.kv_heads),
        linear("self_attn.v_proj", "attn_v", kv, hidden),
        linear("self_attn.o_proj", "attn_output", hidden, hidden, residual),
        norm("post_attention_layernorm", "ffn_norm"),
        linear("mlp.gate_proj", "ffn_gate", ffn, hidden),
        linear("mlp.up_proj", "ffn_up", ffn, hidden),
        linear("mlp.down_proj", "ffn_down", hidden, ffn, residual),
    ]


def draw(tensor: Tensor, index: int, seed: int) -> np.ndarray:
    """Generates tensor `index` of the table as float32."""
    if tensor.std is None:
        return np.ones(tensor.shape, np.float32)
    values = np.random.default_rng([seed, index]).standard_normal(tensor.shape, np.float32)
    values *= np.float32(tensor.std)
    return values


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Returns the upper 16 bits of finite float32 values, rounded to nearest, ties to even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# name -> (safetensors name, transformers name, bytes, conversion)
DTYPES = {
    "f32": ("F32", "float32", 4, lambda values: values),
    "f16": ("F16", "float16", 2, lambda values: values.astype(np.float16)),
    "bf16": ("BF16", "bfloat16", 2, to_bf16),
}


def write_safetensors(path: Path, table: list[Tensor], dtype: str, seed: int):
    name, _, size, convert = DTYPES[dtype]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in table:
        start, end = end, end + size * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, tensor in enumerate(table):
            convert(draw(tensor, index, seed)).tofile(file)


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head from halves (0, 1, .. | d/2, ..) to pairs (0, d/2, 1, d/2 + 1, ..)."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path, shape: Shape, table: list[Tensor], dtype: str, seed: int, vocabulary: byte_bpe.Vocabulary
):
    import gguf

    types = {
        "f32": (np.float32, gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
        "f16": (np.float16, gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
        "bf16": (np.uint16, gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    }
    numpy_type, ggml_type, file_type = types[dtype]
    _, _, size, convert = DTYPES[dtype]

    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, gguf, path.stem, shape, file_type, vocabulary)
    for tensor in table:
        count = int(np.prod(tensor.shape))
        if tensor.std is None:  # llama.cpp keeps norms in float32
            writer.add_tensor_info(tensor.gguf_name, tensor.shape, np.dtype(np.float32), 4 * count)
        else:
            writer.add_tensor_info(
                tensor.gguf_name, tensor.shape, np.dtype(numpy_type), size * count, ggml_type
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for index, tensor in enumerate(table):
        values = draw(tensor, index, seed)
        if tensor.rope_heads:
            values = interleave(values, tensor.rope_heads)
        writer.write_tensor_data(values if tensor.std is None else convert(values))
    writer.close()


def add_metadata(writer, gguf, name: str, shape: Shape, file_type, vocabulary: byte_bpe.Vocabulary):
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_vocab_size(shape.vocab)

    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(
        [control if i < vocabulary.n_specials else normal for i in range(len(vocabulary.tokens))]
    )
    writer.add_token_merges([f"{a} {b}" for a, b in vocabulary.merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


def config(shape: Shape, dtype: str) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": DTYPES[dtype][1],
    }


def tokenizer_config(shape: Shape) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "unk_token": SPECIALS[0],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }


def write_folder(
    folder: Path, shape: Shape, table: list[Tensor], dtype: str, seed: int, vocabulary: byte_bpe.Vocabulary
):
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "config.json": config(shape, dtype),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False},
        "tokenizer.json": vocabulary.tokenizer_json(SPECIALS[BOS]),
        "tokenizer_config.json": tokenizer_config(shape),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", table, dtype, seed)


def main():
    parser = argparse.ArgumentParser(description="Write a Llama model of a named shape with random weights.")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="f16")
    parser.add_argument("--out", type=Path, help="model folder to write")
    parser.add_argument("--gguf", type=Path, help="GGUF file to write with the same weights, in addition to --out or alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.out and not args.gguf:
        parser.error("nothing to write: give --out, --gguf or both")

    shape = SHAPES[args.shape]
    table = tensors(shape)
    vocabulary = byte_bpe.build(shape.vocab, SPECIALS)
    if args.out:
        write_folder(args.out, shape, table, args.dtype, args.seed, vocabulary)
    if args.gguf:
        args.gguf.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(args.gguf, shape, table, args.dtype, args.seed, vocabulary)


if __name__ == "__main__":
    main()
