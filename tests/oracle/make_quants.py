"""Makes blocks of every GGUF number format, with the numbers that the gguf package reads from them.

Writes tests/fixtures/quant/TYPE.bin: the bytes of the blocks, then the numbers as F32, little-endian. For the types
that the package can write, also TYPE.codes: numbers as F32, then the bytes of their blocks. Needs numpy and gguf.
"""

import pathlib
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

HERE = pathlib.Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures" / "quant"
NUMBERS = 1024

# Offsets of the F16 scales of a block: random bytes there could be infinity or NaN.
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.TQ1_0: [52], Type.TQ2_0: [64], Type.MXFP4: [],
}
WRITTEN = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]


def blocks(kind, rng):
    """Returns random blocks: random bits of quants and small scales, F16 scales of all magnitudes and both signs."""
    numbers, size = GGML_QUANT_SIZES[kind]
    count = NUMBERS // numbers
    made = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = (rng.standard_normal(count) * 10.0 ** rng.uniform(-6, 2, count)).astype("<f2")
        made[:, at : at + 2] = scale.view(np.uint8).reshape(count, 2)
    if kind == Type.MXFP4:
        made[:, 0] = rng.integers(0, 255, count)
        made[:3, 0] = [0, 1, 2]
    return made


def numbers(rng):
    """Returns blocks of all magnitudes, one of zeros, one constant, and one with ties in rounding."""
    values = (rng.standard_normal((NUMBERS // 32, 32)) * 10.0 ** rng.uniform(-4, 3, (NUMBERS // 32, 1))).astype("<f4")
    values[0] = 0
    values[1] = -0.75
    values[2] = np.arange(32) / 2 - 8
    return values.reshape(1, -1)


def main():
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for kind in SCALES:
        rng = np.random.default_rng(int(kind))
        made = blocks(kind, rng)
        values = dequantize(made, kind).astype("<f4")
        assert np.isfinite(values).all()
        (FIXTURES / f"{kind.name.lower()}.bin").write_bytes(made.tobytes() + values.tobytes())
    values = numbers(np.random.default_rng(0))
    for kind in WRITTEN:
        codes = quantize(values, kind)
        (FIXTURES / f"{kind.name.lower()}.codes").write_bytes(values.tobytes() + codes.tobytes())


if __name__ == "__main__":
    main()
