"""Makes tests/fixtures/encodings: tiny checkpoints whose linear layers are stored as the packages that quantize models
store them, with the matrices that these packages decode.

    python tests/oracle/make_encodings.py [--autoawq FOLDER] [--auto-gptq FOLDER]

Each folder has config.json, model.safetensors, answers.json and matrices.json. transformers computes the answers in
float32 with the dequantized weights. `matrices.json` has, for each matrix, the type in which the package computes its
numbers (F16 or BF16), the 64-bit FNV-1a hash of their bytes, and the number format in which Mainstem loads it.

compressed-tensors packs and unpacks its own matrices, and transformers unpacks MXFP4. The packing of GPTQ and AWQ is
written here, with numpy only; with the folders of the source distributions of autoawq and auto-gptq, their functions
unpack the matrices too, and have to agree.

| folder | content |
|---|---|
| `gptq` | 4 bits, symmetric, groups of 32, zero points less 1, and a bias of zeros that auto-gptq adds |
| `gptq_any_order` | 4 bits with zero points, columns of groups in any order (`desc_act`) |
| `gptq_v2` | the second version of the format: 4 bits with zero points, one group; `down_proj` with 8 bits, by `dynamic` |
| `awq` | 4 bits with zero points, groups of 32 |
| `compressed` | every encoding of compressed-tensors, one for each matrix |
| `mxfp4` | stacked experts in MXFP4, with a specification of its own |
"""

import argparse
import importlib.util
import json
import re
import shutil

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from make_fixtures import FIXTURES, MARGIN, MAX_POSITIONS, Fixture, answers, check_generate, make_model, make_prompts, record, respell, write_json
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

FOLDER = FIXTURES / "encodings"
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def fnv(tensor):
    """Returns the 64-bit FNV-1a hash of a tensor's bytes."""
    value = 0xCBF29CE484222325
    for byte in tensor.contiguous().view(torch.uint8).flatten().tolist():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def quantized(weight, bits, groups, symmetric):
    """Returns integers (out, in), zero points and F16 scales (out, groups); `groups` has the group of each column."""
    count = int(groups.max()) + 1
    middle, highest = 2 ** (bits - 1), 2**bits - 1
    scales = np.zeros((weight.shape[0], count), np.float16)
    zeros = np.full(scales.shape, middle, np.int64)
    for group in range(count):
        own = weight[:, groups == group]
        if symmetric:
            scales[:, group] = np.abs(own).max(1) / middle
        else:
            low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
            scales[:, group] = (high - low) / highest
            # A zero point of 0 cannot be stored less 1.
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 1, highest)
    spread = scales[:, groups].astype(np.float32)
    quants = np.clip(np.round(weight / spread) + zeros[:, groups], 0, highest).astype(np.int64)
    return quants, zeros, scales


def packed(integers, bits, order=None):
    """Packs the integers along the last axis into I32 words, the first in the lowest bits, or in an order."""
    per = 32 // bits
    words = integers.astype(np.uint64).reshape(*integers.shape[:-1], -1, per)
    words = words[..., order or list(range(per))] << (np.arange(per, dtype=np.uint64) * np.uint64(bits))
    return torch.from_numpy(words.sum(-1).astype(np.uint32).view(np.int32).copy())


def dequantized(quants, zeros, scales, groups):
    """Returns the exact numbers in float32, and those of the packages, which multiply in F16."""
    difference = quants - zeros[:, groups]
    exact = difference.astype(np.float32) * scales[:, groups].astype(np.float32)
    halves = difference.astype(np.float16) * scales[:, groups]
    return torch.from_numpy(exact), torch.from_numpy(halves)


def gptq(weight, bits, groups, symmetric, version):
    quants, zeros, scales = quantized(weight, bits, groups, symmetric)
    tensors = {
        "qweight": packed(quants, bits).T.contiguous(),
        "qzeros": packed((zeros - (version == 1)).T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return tensors, *dequantized(quants, zeros, scales, groups)


def in_order(columns, size):
    return np.arange(columns) // size


def style_gptq(name, weight, random):
    tensors, exact, halves = gptq(weight, 4, in_order(weight.shape[1], GROUP), True, 1)
    if name == "down_proj":
        tensors["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
    return tensors, exact, halves, "q4_0"


def style_gptq_any_order(name, weight, random):
    groups = random.permutation(in_order(weight.shape[1], 16))
    tensors, _, halves = gptq(weight, 4, groups, False, 1)
    return tensors, halves.float(), halves, "f16"


def style_gptq_v2(name, weight, random):
    bits, symmetric = (8, True) if name == "down_proj" else (4, False)
    tensors, exact, halves = gptq(weight, bits, in_order(weight.shape[1], weight.shape[1]), symmetric, 2)
    return tensors, exact, halves, "q8_0"


def style_awq(name, weight, random):
    groups = in_order(weight.shape[1], GROUP)
    quants, zeros, scales = quantized(weight, 4, groups, False)
    tensors = {
        "qweight": packed(quants.T, 4, AWQ_ORDER),
        "qzeros": packed(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, *dequantized(quants, zeros, scales, groups), "q8_0"


# Weights' settings of compressed-tensors, the format, and what Mainstem loads.
COMPRESSED = {
    "q_proj": ({"num_bits": 4, "strategy": "group", "group_size": 32}, "pack-quantized", "q4_0"),
    "k_proj": ({"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}, "pack-quantized", "bf16"),
    "v_proj": ({"num_bits": 4, "strategy": "channel", "symmetric": False}, "pack-quantized", "q8_0"),
    "o_proj": ({"num_bits": 8, "strategy": "channel"}, "int-quantized", "q8_0"),
    "gate_proj": ({"num_bits": 8, "strategy": "tensor"}, "int-quantized", "q8_0"),
    "up_proj": ({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", "bf16"),
    "down_proj": ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 16]}, "float-quantized", "bf16"),
}  # fmt: skip


def parameters(weight, args):
    """Returns the scales (BF16) and zero points that compressed-tensors expects of whoever calibrates."""
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size)}.get(
        args.strategy, args.block_structure
    )
    shape = -(-rows // height), -(-columns // width)
    scales, zeros = torch.zeros(shape), torch.zeros(shape, dtype=torch.int8)
    lowest, highest = (-448, 448) if args.type == "float" else (-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1)
    for i, j in np.ndindex(shape):
        own = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
        if args.symmetric:
            scales[i, j] = own.abs().max() / highest
        else:
            low, high = min(own.min(), 0), max(own.max(), 0)
            scales[i, j] = (high - low) / (highest - lowest)
            zeros[i, j] = torch.round(lowest - low / scales[i, j]).clamp(lowest, highest)
    if args.strategy == "tensor":
        return scales.reshape(1).bfloat16(), zeros.reshape(1)
    return scales.bfloat16(), zeros


def style_compressed(name, weight, random):
    settings, form, loaded = COMPRESSED[name]
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    scales, zeros = parameters(torch.from_numpy(weight), args)
    state = {"weight": torch.from_numpy(weight).bfloat16(), "weight_scale": scales}
    if not args.symmetric:
        state["weight_zero_point"] = zeros
    tensors = compressor.compress(state, scheme)
    numbers = compressor.decompress(tensors, scheme)["weight"]
    exact = numbers.float()
    if loaded in ("q4_0", "q8_0"):
        # Before rounding to BF16: with the scale of 1, the package returns the integers.
        ones = {**tensors, "weight_scale": torch.ones_like(scales)}
        exact = compressor.decompress(ones, scheme)["weight"].float() * scales.float()
    assert numbers.dtype == torch.bfloat16 and torch.equal(exact.bfloat16(), numbers), name
    return tensors, exact, numbers, loaded


LLAMAS = {
    "gptq": (
        style_gptq,
        torch.float16,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    ),
    "gptq_any_order": (
        style_gptq_any_order,
        torch.float16,
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
    ),
    "gptq_v2": (
        style_gptq_v2,
        torch.float16,
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2",
         "dynamic": {"+:.*down_proj": {"bits": 8, "sym": True}}},
    ),
    "awq": (
        style_awq,
        torch.float16,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm", "modules_to_not_convert": None},
    ),
    "compressed": (
        style_compressed,
        torch.bfloat16,
        {"quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed", "ignore": ["lm_head"],
         "config_groups": {
             f"group_{at}": {"targets": [f"re:.*{name}$"], "format": form,
                             "weights": {"type": "int", "symmetric": True, "dynamic": False} | settings}
             for at, (name, (settings, form, _)) in enumerate(COMPRESSED.items())}},
    ),
}  # fmt: skip


def encoded(model, style, dtype, seed):
    """Returns the tensors of the file and the entries of matrices.json, and sets the model's weights to the
    dequantized ones."""
    tensors, matrices, random = {}, {}, np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.removesuffix(".weight")
            projection = module.rsplit(".", 1)[-1]
            if projection in PROJECTIONS:
                own, exact, numbers, loaded = style(projection, weight.numpy().copy(), random)
                weight.copy_(exact)
                tensors |= {f"{module}.{key}": tensor for key, tensor in own.items()}
                matrices[name] = {"type": str(numbers.dtype).removeprefix("torch."), "fnv": fnv(numbers), "loaded": loaded}
            elif name != "lm_head.weight":
                weight.copy_(weight.to(dtype).float())
                tensors[name] = weight.to(dtype)
    return tensors, matrices


def is_clear(entries):
    # A model with one layer repeats itself; the log-probabilities of the prompts are what matters.
    return all(entry["margin"] >= 2 * MARGIN for entry in entries)


def write(name, fixture, seed, config, tensors, matrices, entries):
    folder = FOLDER / name
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", config, indent=2)
    write_json(folder / "matrices.json", matrices, indent=1)
    write_json(folder / "answers.json", answers(fixture, seed, entries))
    print(name, seed)


def make_llama(name):
    style, dtype, quantization = LLAMAS[name]
    # Two ranks can share the heads without cutting blocks of 32 columns.
    fixture = Fixture(f"encodings/{name}", ffn=96, layers=1, heads=2, kv_heads=2, head_dim=32, tied=True, dtype=dtype)
    for seed in range(5000):
        model = make_model(fixture, seed)
        tensors, matrices = encoded(model, style, dtype, seed)
        entries = [record(model, prompt, fixture.eos) for prompt in make_prompts(fixture)[::2]]
        if is_clear(entries):
            break
    check_generate(model, entries)
    config = respell(json.loads(model.config.to_json_string(use_diff=False)) | {"model_type": "llama"}, fixture)
    kept = set(json.loads((FIXTURES / "gqa/config.json").read_text())) | {"head_dim"}
    config = {key: value for key, value in config.items() if key in kept}
    write(name, fixture, seed, config | {"quantization_config": quantization}, tensors, matrices, entries)


def mxfp4(weight):
    """Returns the blocks and scales of stacked matrices (matrices, out, in)."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = weight.reshape(*weight.shape[:2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6))
    scaled = groups / 2.0 ** exponents[..., None]
    quants = np.abs(scaled[..., None] - levels).argmin(-1).astype(np.uint8)
    blocks = quants[..., ::2] | quants[..., 1::2] << 4
    return torch.from_numpy(blocks), torch.from_numpy((exponents + 127).astype(np.uint8))


MXFP4_CONFIG = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "use_sliding_window": False, "hidden_act": "silu",
}  # fmt: skip


def make_mxfp4():
    fixture = Fixture("encodings/mxfp4")
    for seed in range(5000):
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(**MXFP4_CONFIG, initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
        tensors, matrices = {}, {}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.copy_(1.0 + 0.2 * torch.randn_like(weight))
                if ".experts." not in name:
                    weight.copy_(weight.bfloat16().float())
                    if name != "lm_head.weight":
                        tensors[name] = weight.bfloat16()
                    continue
                # (experts, out, in); gate and up are matrices of their own here.
                parts = {"gate_proj": weight[:, :64], "up_proj": weight[:, 64:]} if "gate_up" in name else {"down_proj": weight}
                for part, own in parts.items():
                    blocks, scales = mxfp4(own.numpy())
                    numbers = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
                    own.copy_(numbers.float())
                    module = name.rsplit(".", 1)[0] + f".{part}"
                    tensors |= {f"{module}_blocks": blocks, f"{module}_scales": scales}
                    matrices[module] = {"type": "bfloat16", "fnv": fnv(numbers), "loaded": "mxfp4"}
        entries = [record(model, prompt, fixture.eos) for prompt in make_prompts(fixture)[::2]]
        if is_clear(entries):
            break
    check_generate(model, entries)
    config = {"model_type": "qwen3_moe", **MXFP4_CONFIG, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}
    write("mxfp4", fixture, seed, config | {"quantization_config": quantization}, tensors, matrices, entries)
    spec = (FIXTURES.parent.parent / "specs/qwen3_moe.toml").read_text()
    (FOLDER / "mxfp4/spec.toml").write_text(re.sub(r"experts\.\{e\}\.(\w+)\.weight", r"experts.\1", spec))


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_packages(awq_folder, gptq_folder):
    """Checks that autoawq and auto-gptq unpack the numbers that are recorded."""
    from pathlib import Path

    from safetensors.torch import load_file

    def each(name):
        tensors = load_file(FOLDER / name / "model.safetensors")
        for matrix, entry in json.loads((FOLDER / name / "matrices.json").read_text()).items():
            module = matrix.removesuffix("weight")
            own = {key.removeprefix(module): tensor for key, tensor in tensors.items() if key.startswith(module)}
            yield f"{name} {matrix}", own, entry["fnv"]

    if awq_folder:
        package = module_of(Path(awq_folder) / "awq/utils/packing_utils.py")
        for what, own, expected in each("awq"):
            numbers = package.dequantize_gemm(own["qweight"], own["qzeros"], own["scales"], 4, GROUP)
            assert fnv(numbers.T) == expected, what
    if gptq_folder:
        package = module_of(Path(gptq_folder) / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
        for name, size in [("gptq", GROUP), ("gptq_any_order", 16)]:
            for what, own, expected in each(name):
                rows, columns = own["scales"].shape[1], len(own["g_idx"])
                layer = package.QuantLinear(4, size, columns, rows, False)
                for key in ("qweight", "qzeros", "scales", "g_idx"):
                    setattr(layer, key, own[key])
                # The product with the identity is the matrix; each sum has one term that is not 0.
                numbers = layer(torch.eye(columns, dtype=torch.float16))
                assert fnv(numbers.T) == expected, what


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--autoawq")
    arguments.add_argument("--auto-gptq")
    arguments = arguments.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in LLAMAS:
        make_llama(name)
    make_mxfp4()
    check_packages(arguments.autoawq, arguments.auto_gptq)


if __name__ == "__main__":
    main()
