"""Makes tests/fixtures/pickle: checkpoints as torch.save writes them, in its zip format and in the older stream
format.

    python tests/oracle/make_pickles.py

`zip`, `stream` and `sharded` contain the weights of the fixture `bf16`, which must exist. Their numbers are the same,
but their order, types and storages differ. `kinds` contains a few tensors of every kind, and `kinds.json` the
expected result of each. `programs.json` contains separate pickles, with the objects that Python loads from them.

Invariant: PyTorch itself reads every file back to the intended tensors.
"""

import json
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
FOLDER = FIXTURES / "pickle"
SINGLE = "pytorch_model.bin"
LAYERS = 2

FOREIGN = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
}
NEWER = ["uint16", "float8_e4m3fn"]  # types for which the older format has no storages
KEPT = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def weights() -> OrderedDict:
    return OrderedDict(sorted(load_file(FIXTURES / "bf16" / "model.safetensors").items()))


def column_major(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers, stored column by column."""
    return matrix.t().contiguous().t()


def spread(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers, in every other row of a matrix with twice as many rows."""
    wide = torch.zeros(2 * matrix.shape[0], matrix.shape[1], dtype=matrix.dtype)
    wide[1::2] = matrix
    return wide[1::2]


def rearranged(state: OrderedDict) -> OrderedDict:
    """Returns the same numbers, stored in all the ways that occur in state dicts."""
    state = OrderedDict(state)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        key, value = (f"{layer}.self_attn.{p}_proj.weight" for p in "kv")
        both = torch.cat([torch.zeros_like(state[key][:1]), state[key], state[value]])
        rows = len(state[key])
        state[key], state[value] = both[1 : 1 + rows], both[1 + rows :]
        state[f"{layer}.self_attn.q_proj.weight"] = column_major(state[f"{layer}.self_attn.q_proj.weight"])
        state[f"{layer}.input_layernorm.weight"] = state[f"{layer}.input_layernorm.weight"].double()
    state["model.layers.0.mlp.down_proj.weight"] = spread(state["model.layers.0.mlp.down_proj.weight"])
    state["lm_head.weight"] = torch.nn.Parameter(state["lm_head.weight"])
    # Tensors that the specification ignores, and objects that are not tensors.
    state["model.rotary_emb.inv_freq"] = torch.arange(4)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.tensor([True, False])
    state["version"] = (1, "two", None, 3.5, [-4, 2**40], {"six": torch.float16, 7: torch.Size([8, 9])})
    state._metadata = OrderedDict([("", {"version": 1})])
    return state


def assert_same(loaded: dict, meant: dict):
    assert list(loaded) == list(meant)
    for name, tensor in meant.items():
        if isinstance(tensor, torch.Tensor):
            assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def save(content: dict, file: Path, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file, **options)


def load(file: Path) -> dict:
    # PyTorch's safe reader does not support the newer protocols. The file is safe, because it was written just now.
    return torch.load(file, weights_only=False)


def make_whole():
    """Writes one file in each format. In one of them, the state dict is one of several objects, as training programs
    do it."""
    state = rearranged(weights())
    save(state, FOLDER / "zip" / SINGLE)
    assert_same(load(FOLDER / "zip" / SINGLE), state)
    content = {"epoch": 3, "model": state, "history": [0.5, 0.25], "config": {"model": "tiny", "layers": LAYERS}}
    save(content, FOLDER / "stream" / SINGLE, _use_new_zipfile_serialization=False)
    assert_same(load(FOLDER / "stream" / SINGLE)["model"], state)


def make_sharded():
    """Writes two files with the newest protocols, and an index."""
    state = weights()
    names = [f"pytorch_model-{i:05}-of-00002.bin" for i in (1, 2)]
    files = {name: names[i * 2 // len(state)] for i, name in enumerate(state)}
    for protocol, file in zip((4, 5), names):
        part = {name: tensor for name, tensor in state.items() if files[name] == file}
        save(part, FOLDER / "sharded" / file, pickle_protocol=protocol)
        assert_same(load(FOLDER / "sharded" / file), part)
    size = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (FOLDER / "sharded" / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=1) + "\n")


def kinds() -> OrderedDict:
    """Returns a tensor of every type, rank and memory layout."""
    numbers = torch.arange(24, dtype=torch.float32) / 8 - 1
    cube = numbers.reshape(2, 3, 4)
    state = OrderedDict()
    for dtype in [*KEPT, torch.float64, *FOREIGN]:
        state[str(dtype).removeprefix("torch.")] = numbers.abs().to(dtype)[3:9].reshape(2, 3)
    state["single"] = numbers[5]
    state["none"] = torch.zeros(0, 3)
    state["none within"] = numbers[4:4]
    state["deep"] = numbers[:16].reshape(1, 2, 1, 2, 2, 1, 2).permute(6, 0, 3, 1, 2, 5, 4)
    state["cube"] = cube
    state["cube, turned"] = cube.permute(2, 0, 1)
    state["cube, cut"] = cube[:, 1:, ::3]
    state["diagonal"] = cube[0, :, :3].diagonal()
    state["one row"] = cube[:1, :1, 2]
    state["doubles, turned"] = cube[0].double().t()
    state["halves, turned"] = cube[1].half().t()
    state["overlapping"] = numbers.as_strided((3, 4), (2, 1), 2)
    state["the same"] = state["cube"]
    return state


def become(tensor: torch.Tensor) -> dict:
    """Returns the expected result of reading a tensor: floating-point numbers row by row, for others the name of the
    type."""
    if tensor.dtype in FOREIGN:
        return {"dtype": FOREIGN[tensor.dtype], "shape": list(tensor.shape)}
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    numbers = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten())
    content = bytes(numbers.view(torch.uint8).tolist())
    return {"dtype": KEPT[tensor.dtype], "shape": list(tensor.shape), "bytes": content.hex()}


def make_kinds():
    state = kinds()
    for file, options in {
        "zip1.bin": {"pickle_protocol": 1},
        "zip2.bin": {},
        "zip5.bin": {"pickle_protocol": 5},
        "stream.bin": {"_use_new_zipfile_serialization": False},
    }.items():
        stored = {name: tensor for name, tensor in state.items() if file != "stream.bin" or name not in NEWER}
        save(stored, FOLDER / "kinds" / file, **options)
        assert_same(load(FOLDER / "kinds" / file), stored)
    expected = {name: become(tensor) for name, tensor in state.items()}
    (FOLDER / "kinds" / "kinds.json").write_text(json.dumps(expected, indent=1) + "\n")


VALUES = [
    [0, 255, 256, 65535, 65536, -1, -32769, 2**31 - 1, 2**31, -(2**63), 2**80, -(2**90), True, False, None],
    {"a": (), "b": (1,), "c": (1, 2), "d": (1, 2, 3), "e": (1, 2, 3, 4), 5: [[]], "long": "x" * 300},
    OrderedDict([("first", 1.5), ("second", "é水🙂"), ("third", {})]),
    [(shared := ["shared"]), shared, (shared, shared)],
]
# Pickles that are rarely written, and invalid ones.
PROGRAMS = [
    b"(K\x01K\x020K\x03t.",  # POP
    b"](K\x01K\x021K\x03a.",  # POP_MARK
    b"]K\x012\x86a.",  # DUP
    b"]((K\x010K\x02ta.",  # an unused mark
    b"](0K\x02a.",  # POP of a mark
    b"](((t\x85te.",
    b"](K\x01(K\x02K\x03e.",
    b"](e.",
    b"}(u.",
    b"}(K\x01u.",  # a key without a value
    b"}K\x01K\x02s.",
    b"K\x01q\x07K\x02q\x070h\x07\x86.",  # a memo index that is used twice
    b"K\x01r\xff\x00\x00\x000K\x02h\xffj\xff\x00\x00\x00\x87.",
    b"\x80\x04K\x01\x94K\x02\x94h\x00h\x01\x86\x87.",
    b"h\x00.",
    b"I01\nI00\nI7\n\x87.",
    b"I-12\nL-5L\nL6\n\x87.",
    b"Ix\n.",
    b"\x8b\x02\x00\x00\x00\x00\x80.",  # LONG4
    b"\x8b\xff\xff\xff\xff.",
    b"\x8a\x00.",
    b"U\x03abc.",  # a Python 2 string
    b"T\x03\x00\x00\x00abc.",
    b"ccollections\nOrderedDict\n(](](K\x01K\x02e](K\x03K\x04eetR.",  # a Python 2 OrderedDict
    b"ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00aK\x01sb.",
    b"ccollections\nOrderedDict\n)R)Rb.",
    b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R.",
    b"ctorch\nSize\n(K\x02K\x03t\x85R.",
    b"0.",
    b".",
    b"(.",
    b"(K\x01\x86.",  # TUPLE2 with a mark below
    b"(\x85.",
    b"K\x01(2t\x86.",
    b"K\x01(q\x01t\x86.",
    b"ccollections\nOrderedDict\n)(R(t.",
    b"(a.",
    b"t.",
    b"u.",
    b"2.",
    b"1.",
    b"K\x01K\x02a.",
    b"K\x01",
    b"\x80\x06K\x01.",
    b"\x80\x04\x95\x03\x00\x00\x00\x00\x00\x00\x00K\x01.",
    b"\x80\x04\x95\x04\x00\x00\x00\x00\x00\x00\x00K\x01.",
]


def shown(value) -> str:
    """Formats a value as text, without what the reader discards: the values of floats, and the types of dicts and
    tuples."""
    match value:
        case float():
            return "float"
        case dict():
            return "{" + ", ".join(f"{shown(key)}: {shown(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(shown, value)) + "]"
        case tuple():
            return "(" + "".join(f"{shown(item)}, " for item in value) + ")"
        case str():
            return f"'{value}'"
    return str(value)


def made_by(program: bytes) -> str | None:
    """Returns the object that Python loads from a pickle as text, or None if it rejects the pickle."""
    try:
        return shown(pickle.loads(program))
    except Exception:
        return None


def make_programs():
    dumped = [pickle.dumps(value, protocol) for value in VALUES for protocol in range(1, 6)]
    entries = [{"pickle": program.hex(), "makes": made_by(program)} for program in dumped + PROGRAMS]
    (FOLDER / "programs.json").write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_whole()
    make_sharded()
    make_kinds()
    make_programs()
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{FOLDER.name} {size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
