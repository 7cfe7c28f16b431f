"""Makes tests/fixtures/f8: PyTorch's value of each bit pattern of float8_e4m3fn, and tiny checkpoints whose linear
layers are stored in this type, with scales as in checkpoints on the hub.

    python tests/oracle/make_f8.py

`e4m3.bin` has the 256 values as F32, little-endian. Each folder has config.json, model.safetensors and answers.json.
transformers computes the answers in float32 with the dequantized weights, rounded to bfloat16 as for serving.
`tensor` has one scale per matrix, and additional scales of activations; `channel` has one per row; `block` has one
per block, where the blocks at the edges are smaller, and blocks are not square.
"""

import json
import shutil

import torch
from make_fixtures import FIXTURES, MARGIN, Fixture, answers, check_generate, make_model, make_prompts, record, respell, write_json
from safetensors.torch import save_file
from transformers.utils import logging

FOLDER = FIXTURES / "f8"
BLOCK = (24, 16)
LARGEST = 448.0


def shared(weight, style):
    """Returns the numbers of rows and columns that share a scale."""
    rows, columns = weight.shape
    return {"tensor": (rows, columns), "channel": (1, columns), "block": BLOCK}[style]


def blocks(weight, style):
    """Returns the scale of each block, and the quantized weight."""
    height, width = shared(weight, style)
    scales = torch.zeros(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    codes = torch.zeros_like(weight).to(torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[place].abs().max() / LARGEST
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return scales, codes


def spread(scales, weight, style):
    """Returns the scale of each element."""
    height, width = shared(weight, style)
    return scales.repeat_interleave(height, 0)[: weight.shape[0]].repeat_interleave(width, 1)[:, : weight.shape[1]]


def stored(style, name, weight):
    """Returns the tensors of a linear layer, and the dequantized weight."""
    scales, codes = blocks(weight, style)
    numbers = (codes.float() * spread(scales, weight, style)).bfloat16().float()
    tensors = {f"{name}": codes}
    if style == "tensor":
        tensors[f"{name}_scale"] = scales.reshape(())
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.25)
    elif style == "channel":
        tensors[f"{name}_scale"] = scales.bfloat16()
        numbers = (codes.float() * spread(scales.bfloat16().float(), weight, style)).bfloat16().float()
    else:
        tensors[f"{name}_scale_inv"] = scales
    return tensors, numbers


def is_coded(name):
    return name.endswith("proj.weight")


def coded(model, style):
    """Returns the tensors of the file, and sets the weights of the model to the dequantized ones."""
    tensors = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_coded(name):
                own, numbers = stored(style, name, weight)
                weight.copy_(numbers)
                tensors |= own
            elif name != "lm_head.weight":
                tensors[name] = weight.bfloat16()
    return tensors


def make(style):
    fixture = Fixture(f"f8/{style}", ffn=40, layers=1, kv_heads=2, tied=True, dtype=torch.bfloat16)
    for seed in range(5000):
        model = make_model(fixture, seed)
        tensors = coded(model, style)
        entries = [record(model, prompt, fixture.eos) for prompt in make_prompts(fixture)[::2]]
        # A model with one layer repeats itself; the log-probabilities of the prompts are what matters.
        if all(entry["margin"] >= 2 * MARGIN for entry in entries):
            break
    check_generate(model, entries)
    folder = FOLDER / style
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if style == "block":
        quantization["weight_block_size"] = list(BLOCK)
    config = respell(json.loads(model.config.to_json_string(use_diff=False)) | {"model_type": "llama"}, fixture)
    kept = set(json.loads((FIXTURES / "gqa/config.json").read_text()))
    config = {key: value for key, value in config.items() if key in kept}
    write_json(folder / "config.json", config | {"quantization_config": quantization}, indent=2)
    write_json(folder / "answers.json", answers(fixture, seed, entries))
    print(style, seed)


def main():
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    (FOLDER / "e4m3.bin").write_bytes(codes.float().numpy().astype("<f4").tobytes())
    for style in ("tensor", "channel", "block"):
        make(style)


if __name__ == "__main__":
    main()
