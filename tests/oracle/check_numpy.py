"""Recomputes every recorded output with a plain numpy forward pass, written from the formulas, in float64.

    python tests/oracle/check_numpy.py

Needs only numpy. The script parses the files itself, byte by byte, so it also checks their contents. It also shows
that a wrong rotation would be detected: without the RoPE scaling, or with the other order of pairs, the outputs must
differ.

Invariant: no code is shared with the script that made the fixtures, or with the library that computed the outputs.
"""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
# GGUF files and their recorded outputs.
GGUF = {
    "f32": "rope_llama3/answers.json",
    "f16": "bf16/answers.json",
    "q8_0": "gguf/q8_0.json",
    "q4_0": "gguf/q4_0.json",
}
TOLERANCE = 1e-4
NOTICED = 1e-2


@dataclass(frozen=True)
class Model:
    """Weights by hub name, and the other parameters of the forward pass."""

    weights: dict[str, np.ndarray]
    layers: int
    head_dim: int
    eps: float
    frequencies: np.ndarray  # radians per position, (head_dim / 2,)
    interleaved: bool = False

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.weights[f"{name}.weight"]


def forward(model: Model, ids: list[int]) -> np.ndarray:
    """Returns (len(ids), vocab) log-probabilities of the next token after each position."""
    x = model.weights["model.embed_tokens.weight"][ids]
    for i in range(model.layers):
        layer = f"model.layers.{i}"
        x = x + attention(model, f"{layer}.self_attn", model.norm(f"{layer}.input_layernorm", x))
        x = x + mlp(model, f"{layer}.mlp", model.norm(f"{layer}.post_attention_layernorm", x))
    logits = model.norm("model.norm", x) @ model.weights["lm_head.weight"].T
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def attention(model: Model, name: str, x: np.ndarray) -> np.ndarray:
    """Computes causal attention of all heads; each group of query heads shares a head of k and v."""
    n = len(x)
    # each (heads, n, head_dim)
    q, k, v = (
        model.linear(f"{name}.{p}_proj", x).reshape(n, -1, model.head_dim).swapaxes(0, 1) for p in "qkv"
    )
    q, k = rotate(model, q), rotate(model, k)
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(model.head_dim)
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return model.linear(f"{name}.o_proj", (weights @ v).swapaxes(0, 1).reshape(n, -1))


def rotate(model: Model, x: np.ndarray) -> np.ndarray:
    """Rotates pair j of every head by position * frequency j; pairs are (j, j + d/2), or (2j, 2j + 1) if
    interleaved."""
    angles = np.arange(x.shape[1])[:, None] * model.frequencies
    turn = np.exp(1j * angles)
    half = model.head_dim // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if model.interleaved else (slice(half), slice(half, None))
    )
    turned = (x[..., first] + 1j * x[..., second]) * turn
    out = np.empty_like(x)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def mlp(model: Model, name: str, x: np.ndarray) -> np.ndarray:
    gate = model.linear(f"{name}.gate_proj", x)
    return model.linear(
        f"{name}.down_proj", gate / (1.0 + np.exp(-gate)) * model.linear(f"{name}.up_proj", x)
    )


def base_frequencies(head_dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


def scaled(frequencies: np.ndarray, rope: dict) -> np.ndarray:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    assert kind == "llama3", kind
    # Rotations of a pair over the original context: below low_freq_factor, its frequency is divided by the factor; above
    # high_freq_factor, it is unchanged; in between, the two are interpolated.
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    assert 0 in kept and 1 in kept and np.any((kept > 0) & (kept < 1)), (
        "a fixture should have pairs in all three bands"
    )
    return kept * frequencies + (1 - kept) * frequencies / rope["factor"]


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    (header_len,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_len])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + header_len + offset for offset in entry["data_offsets"])
        tensors[name] = numbers(data[start:end], entry["dtype"]).reshape(entry["shape"])
    return tensors


def numbers(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float64)


def read_folder(folder: Path) -> tuple[Model, Model | None]:
    """Returns the model, and the same without RoPE scaling if it has one."""
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= read_safetensors(path)
    assert ("lm_head.weight" in weights) != config["tie_word_embeddings"]
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    plain = base_frequencies(head_dim, theta)
    model = Model(weights, config["num_hidden_layers"], head_dim, config["rms_norm_eps"], scaled(plain, rope))
    return model, replace(model, frequencies=plain) if "factor" in rope else None


def read_llama2c(path: Path) -> Model:
    data, group = path.read_bytes(), None
    if data[:4] == b"24ka":
        version, dim, ffn, layers, heads, kv_heads, vocab, positions, shared = struct.unpack_from(
            "<8iB", data, 4
        )
        assert version in (1, 2)
        if version == 2:
            (group,) = struct.unpack_from("<i", data, 37)
        start, order = 256, "norm1 norm2 final embedding q k v o gate down up"
    else:
        dim, ffn, layers, heads, kv_heads, vocab, positions = struct.unpack_from("<7i", data)
        shared, vocab = vocab > 0, abs(vocab)
        start, order = 28, "embedding norm1 q k v o norm2 gate down up final tables"
    head_dim, kv = dim // heads, kv_heads * (dim // heads)
    shapes = {
        "norm1": (layers, dim), "norm2": (layers, dim), "final": (dim,), "embedding": (vocab, dim),
        "q": (layers, dim, dim), "k": (layers, kv, dim), "v": (layers, kv, dim), "o": (layers, dim, dim),
        "gate": (layers, ffn, dim), "down": (layers, dim, ffn), "up": (layers, ffn, dim),
        "tables": (2, positions, head_dim // 2), "classifier": (vocab, dim),
    }  # fmt: skip
    data, parts = data[start:], {}
    for name in order.split() + ["classifier"] * (not shared):
        # The quants of each layer are followed by their scales.
        shape, read = shapes[name], []
        for _ in range(shape[0] if len(shape) == 3 else 1):
            count = int(np.prod(shape[-2:]))
            is_norm = name in ("norm1", "norm2", "final")
            values, data = take(data, count, None if is_norm else group)
            read.append(values)
        parts[name] = np.concatenate(read).reshape(shape)
    assert not data, f"{path}: {len(data)} bytes left over"
    frequencies = base_frequencies(head_dim, 10000.0)
    return Model(hub_names(parts, layers), layers, head_dim, 1e-5, frequencies, interleaved=True)


def take(data: bytes, count: int, group: int | None) -> tuple[np.ndarray, bytes]:
    """Returns the first `count` numbers and the remaining bytes. Numbers are F32, or signed bytes followed by a scale
    for each group of them."""
    if group is None:
        return numbers(data[: 4 * count], "F32"), data[4 * count :]
    codes = np.frombuffer(data, "i1", count).reshape(-1, group)
    scales = np.frombuffer(data, "<f4", count // group, offset=count).astype(np.float64)
    return (codes * scales[:, None]).ravel(), data[count + 4 * (count // group) :]


def hub_names(parts: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    names = {
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj", "down": "mlp.down_proj", "up": "mlp.up_proj",
    }  # fmt: skip
    weights = {
        f"model.layers.{i}.{hub}.weight": parts[part][i] for part, hub in names.items() for i in range(layers)
    }
    weights["model.norm.weight"] = parts["final"]
    weights["model.embed_tokens.weight"] = parts["embedding"]
    weights["lm_head.weight"] = parts.get("classifier", parts["embedding"])
    return weights


def read_gguf(path: Path) -> tuple[Model, Model]:
    """Returns the model, and the same with the other order of rotated pairs."""
    settings, tensors = gguf_parts(path.read_bytes())
    layers, heads = settings["llama.block_count"], settings["llama.attention.head_count"]
    head_dim = settings["llama.embedding_length"] // heads
    frequencies = base_frequencies(head_dim, settings["llama.rope.freq_base"])
    frequencies = frequencies / tensors.pop("rope_freqs.weight", 1.0)
    parts = {
        "norm1": "attn_norm", "norm2": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
        "gate": "ffn_gate", "down": "ffn_down", "up": "ffn_up",
    }  # fmt: skip
    layered = {
        part: np.stack([tensors.pop(f"blk.{i}.{name}.weight") for i in range(layers)])
        for part, name in parts.items()
    }
    whole = {"embedding": tensors.pop("token_embd.weight"), "final": tensors.pop("output_norm.weight")}
    if "output.weight" in tensors:
        whole["classifier"] = tensors.pop("output.weight")
    assert not tensors, f"{path}: {sorted(tensors)} left over"
    eps = settings["llama.attention.layer_norm_rms_epsilon"]
    model = Model(hub_names(layered | whole, layers), layers, head_dim, eps, frequencies, interleaved=True)
    return model, replace(model, interleaved=False)


def gguf_parts(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns metadata and tensors of a version 3 file."""
    at = 0

    def take(form: str):
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return value

    def string() -> str:
        return take(f"{take('Q')}s").decode()

    def value(kind: int):
        if kind == 8:
            return string()
        if kind == 9:
            elements, count = take("I"), take("Q")
            return [value(elements) for _ in range(count)]
        return take("B b H h I i f ? _ _ Q q d".split()[kind])

    assert (take("4s"), take("I")) == (b"GGUF", 3)
    n_tensors, n_settings = take("Q"), take("Q")
    settings = {string(): value(take("I")) for _ in range(n_settings)}
    described = [
        (string(), [take("Q") for _ in range(take("I"))], take("I"), take("Q")) for _ in range(n_tensors)
    ]
    start = (at + 31) // 32 * 32
    return settings, {
        name: gguf_numbers(data[start + offset :], int(np.prod(dims)), kind).reshape(dims[::-1])
        for name, dims, kind, offset in described
    }


def gguf_numbers(data: bytes, count: int, kind: int) -> np.ndarray:
    """Returns the first `count` numbers: F32, F16, BF16, or blocks of 32 with a scale before them."""
    if kind in (0, 1, 30):
        name, size = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}[kind]
        return numbers(data[: count * size], name)
    size = {2: 18, 8: 34}[kind]
    blocks = np.frombuffer(data, np.uint8, count // 32 * size).reshape(-1, size)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float64)
    codes = blocks[:, 2:]
    if kind == 8:
        return scales * codes.view(np.int8)
    return scales * (np.hstack([codes % 16, codes // 16]).astype(np.float64) - 8)


def worst_difference(model: Model, answers_file: Path) -> float:
    """Returns the largest difference of any recorded log-probability. Also asserts that the recorded lists are
    consistent."""
    worst = 0.0
    content = json.loads(answers_file.read_text())
    for entry in content["answers"]:
        prompt, answer = entry["prompt"], entry["answer"]
        ids = prompt + answer
        table = forward(model, ids)[:-1]
        recorded = np.array(entry["prompt_logprobs"] + entry["answer_logprobs"])
        worst = max(worst, np.abs(table[np.arange(len(ids) - 1), ids[1:]] - recorded).max())
        steps = table[len(prompt) - 1 :]
        top = np.take_along_axis(steps, np.array(entry["top5_ids"]), axis=1)
        worst = max(worst, np.abs(top - np.array(entry["top5_logprobs"])).max())
        assert [row[0] for row in entry["top5_ids"]] == answer
        assert (entry["finish"] == "stop") == (
            answer[-1] in content["eos_token_ids"] and not entry["ignore_eos"]
        )
    return worst


def check(name: str, model: Model, wrong: Model | None, answers_file: Path):
    worst = worst_difference(model, answers_file)
    line = f"{name:18} worst difference {worst:.1e}"
    assert worst < TOLERANCE, line
    if wrong:
        noticed = worst_difference(wrong, answers_file)
        line += f", with a wrong rotation {noticed:.1e}"
        assert noticed > NOTICED, line
    print(line)


def main():
    folders = sorted(
        path.parent for path in FIXTURES.glob("*/config.json") if (path.parent / "answers.json").exists()
    )
    assert folders, f"no fixtures in {FIXTURES}"
    for folder in folders:
        check(folder.name, *read_folder(folder), folder / "answers.json")
    for path in sorted((FIXTURES / "llama2c").glob("v*.bin")):
        model = read_llama2c(path)
        version, suffix = path.stem[:2], path.stem[2:]
        answers_file = path.parent / f"answers{'_v2' * (version == 'v2')}{suffix}.json"
        check(f"llama2c/{path.stem}", model, replace(model, interleaved=False), answers_file)
    for name, answers_file in GGUF.items():
        check(f"gguf/{name}", *read_gguf(FIXTURES / "gguf" / f"{name}.gguf"), FIXTURES / answers_file)


if __name__ == "__main__":
    main()
