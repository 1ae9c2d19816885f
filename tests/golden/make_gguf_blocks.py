"""Writes gguf_blocks.bin: random blocks of each GGUF type and what the `gguf` package reads in them.

    pip install gguf && python tests/golden/make_gguf_blocks.py

One record a type, little-endian: 8 bytes of name, uint32 bytes of blocks, uint32 elements, the
blocks, the elements as float32. Quants are random bytes; the f16 scales are made finite, and some
are subnormal, zero or negative.
"""

import pathlib
import struct

import gguf
import numpy as np

# Where a block has its f16 scales and minima.
F16_OFFSETS = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}
SPECIAL_SCALES = [0.0, -0.0, 6e-8, -3e-6, 65504.0, 1.0]
ELEMENTS = 2048


def main():
    rng = np.random.default_rng(7)
    out = bytearray()
    for name, offsets in F16_OFFSETS.items():
        kind = gguf.GGMLQuantizationType[name]
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_blocks = ELEMENTS // block_elements
        blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        for offset in offsets:
            scales = rng.normal(0, 0.05, num_blocks)
            special = SPECIAL_SCALES[: num_blocks // 2]
            scales[: len(special)] = special
            blocks[:, offset : offset + 2] = (
                scales.astype(np.float16).view(np.uint8).reshape(num_blocks, 2)
            )
        values = gguf.quants.dequantize(blocks.reshape(-1), kind).astype(np.float32).reshape(-1)
        out += name.encode().ljust(8, b"\0")
        out += struct.pack("<II", blocks.size, values.size)
        out += blocks.tobytes() + values.tobytes()
    path = pathlib.Path(__file__).parent / "gguf_blocks.bin"
    path.write_bytes(out)
    print(path, len(out), "bytes")


if __name__ == "__main__":
    main()
