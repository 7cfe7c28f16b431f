"""Writes llama2.c's files: model .bin versions 0 and 1 (float32) and 2 (int8 in groups), and tokenizer.bin.

Invariant: rows of q and k are in interleaved order (each rotated pair adjacent), as llama2.c expects; the given model
has them in the order of halves.
"""

import string
import struct
from pathlib import Path

import numpy as np

MAGIC = 0x616B3432  # "ak42"
HEADER_BYTES = 256  # since version 1


def write_v0(path: Path, model):
    """Writes version 0: a 28-byte header; a negative vocabulary size means that a classifier follows at the end."""
    c, weights = model.config, Weights(model)
    vocab = c.vocab_size if c.tie_word_embeddings else -c.vocab_size
    with path.open("wb") as file:
        file.write(header(c, vocab))
        weights.embedding().tofile(file)
        for name in ("norm1", "q", "k", "v", "o", "norm2", "gate", "down", "up"):
            weights.write_layers(file, name)
        weights.final_norm().tofile(file)
        for table in rotation_tables(c):
            table.tofile(file)
        if not c.tie_word_embeddings:
            weights.classifier().tofile(file)


def write_v1(path: Path, model):
    """Writes version 1: a 256-byte header with magic, version and a flag for the shared classifier; norms come
    first."""
    c, weights = model.config, Weights(model)
    with path.open("wb") as file:
        file.write(long_header(c, 1))
        weights.write_layers(file, "norm1")
        weights.write_layers(file, "norm2")
        weights.final_norm().tofile(file)
        weights.embedding().tofile(file)
        for name in ("q", "k", "v", "o", "gate", "down", "up"):
            weights.write_layers(file, name)
        if not c.tie_word_embeddings:
            weights.classifier().tofile(file)


def write_v2(path: Path, model, group: int):
    """Writes version 2: like version 1, with the group size in the header; a matrix is all its quants, then all its
    scales."""
    c, weights = model.config, Weights(model)
    with path.open("wb") as file:
        file.write(long_header(c, 2, struct.pack("<i", group)))
        weights.write_layers(file, "norm1")
        weights.write_layers(file, "norm2")
        weights.final_norm().tofile(file)
        matrices = [weights.embedding()]
        for name in ("q", "k", "v", "o", "gate", "down", "up"):
            matrices += weights.layers(name)
        if not c.tie_word_embeddings:
            matrices.append(weights.classifier())
        for matrix in matrices:
            for part in grouped(matrix, group):
                part.tofile(file)


def grouped(matrix: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns quants and scales: the largest magnitude of a group becomes 127. Groups continue across rows."""
    values = matrix.reshape(-1, group)
    scales = np.abs(values).max(axis=1) / np.float32(127)
    return np.round(values / scales[:, None]).astype("i1"), scales.astype("<f4")


def held(matrix: np.ndarray, group: int) -> np.ndarray:
    """Quantizes and dequantizes a matrix."""
    codes, scales = grouped(matrix, group)
    return (codes.astype(np.float32) * scales[:, None]).reshape(matrix.shape)


def long_header(c, version: int, rest: bytes = b"") -> bytes:
    start = struct.pack("<Ii", MAGIC, version) + header(c, c.vocab_size)
    return (start + struct.pack("<B", c.tie_word_embeddings) + rest).ljust(HEADER_BYTES, b"\0")


def header(c, vocab: int) -> bytes:
    sizes = (
        c.hidden_size,
        c.intermediate_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    return struct.pack("<7i", *sizes, vocab, c.max_position_embeddings)


def rotation_tables(c) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines, (positions, head_dim / 2); readers recompute them and skip these tables."""
    frequencies = c.rope_parameters["rope_theta"] ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    angles = np.outer(np.arange(c.max_position_embeddings), frequencies)
    return np.cos(angles).astype("<f4"), np.sin(angles).astype("<f4")


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the rows of each head from halves (0, 1, .. | d/2, ..) to pairs (0, d/2, 1, d/2 + 1, ..)."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


class Weights:
    """The tensors of a transformers Llama under the names of the file format."""

    LAYER_NAMES = {
        "norm1": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "down": "mlp.down_proj",
        "up": "mlp.up_proj",
    }

    def __init__(self, model):
        self.config = model.config
        self.state = {name: tensor.numpy().astype("<f4") for name, tensor in model.state_dict().items()}

    def embedding(self) -> np.ndarray:
        return self.state["model.embed_tokens.weight"]

    def final_norm(self) -> np.ndarray:
        return self.state["model.norm.weight"]

    def classifier(self) -> np.ndarray:
        return self.state["lm_head.weight"]

    def layers(self, name: str) -> list[np.ndarray]:
        """Returns one kind of tensor, layer by layer, with rows in the order of the format."""
        layers = range(self.config.num_hidden_layers)
        tensors = [self.state[f"model.layers.{i}.{self.LAYER_NAMES[name]}.weight"] for i in layers]
        return [interleave(t, self.config.head_dim) for t in tensors] if name in ("q", "k") else tensors

    def write_layers(self, file, name: str):
        for tensor in self.layers(name):
            tensor.tofile(file)


def write_tokenizer(path: Path, size: int):
    """Writes special tokens, the bytes as <0xNN>, merged pieces in order of score, then single characters."""
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{b:02X}>" for b in range(256))]
    characters = [" ", *string.ascii_lowercase]
    merged = [" t", "he", "in", " the", "er", "an", "re", "on", " a", "th", "at", "en", "or", " in", "st"]
    pieces = [*merged, *characters]
    assert len(tokens) + len(pieces) == size, f"the pieces make {len(tokens) + len(pieces)} tokens"
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    spellings = [piece.encode() for piece in [*tokens, *pieces]]
    with path.open("wb") as file:
        file.write(struct.pack("<i", max(map(len, spellings))))
        for spelling, score in zip(spellings, scores, strict=True):
            file.write(struct.pack("<fi", score, len(spelling)) + spelling)
