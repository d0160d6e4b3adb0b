#!/usr/bin/env python3
"""Writes a model with the shape of a real one and seeded weights (Q4_0, GGUF), for measuring: shaped_model.py 8b|toy OUT.gguf
Its answers mean nothing. All tensors are cut from one block of random weights, each from another place, so that it is written
as fast as the disk takes it (8b: 4.5 GB)."""
import random, struct, sys

SHAPES = {  # layers, width, inner width, heads, key heads, vocabulary, context
    "8b": (32, 4096, 14336, 32, 8, 128256, 8192),
    "toy": (8, 64, 96, 4, 2, 512, 512),
}
GROUP, BLOCK = 32, 18  # weights and bytes of a block of Q4_0
POOL = 1 << 16         # blocks
EVEN = bytes((b or 8) | (t or 8) << 4 for t in range(16) for b in range(16))  # codes 1 to 15: 8 stands for 0


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def number(key, value):
    kind, form = (6, "<f") if isinstance(value, float) else (4, "<I")
    return text(key) + struct.pack("<I", kind) + struct.pack(form, value)


def array(key, kind, items):
    return text(key) + struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)


def byte_names():
    """The characters that stand for bytes in GPT-2's vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def metadata(shape):
    layers, width, inner, heads, key_heads, vocab, context = shape
    names = byte_names() + ["<eos>"] + [f"<t{i}>" for i in range(257, vocab)]
    strings = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    numbers = {"context_length": context, "embedding_length": width, "block_count": layers, "feed_forward_length": inner,
               "attention.head_count": heads, "attention.head_count_kv": key_heads, "rope.dimension_count": width // heads,
               "rope.freq_base": 500000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    parts = [text(k) + struct.pack("<I", 8) + text(v) for k, v in strings.items()]
    parts += [number("llama." + k, v) for k, v in numbers.items()]
    parts += [number("tokenizer.ggml.eos_token_id", 256), array("tokenizer.ggml.tokens", 8, [text(n) for n in names]),
              array("tokenizer.ggml.token_type", 5, [struct.pack("<i", 3 if i == 256 else 1) for i in range(vocab)]),
              array("tokenizer.ggml.merges", 8, [text("a b")])]
    return len(parts), b"".join(parts)


def tensors(shape):
    layers, width, inner, heads, key_heads, vocab, _ = shape
    keys = width // heads * key_heads
    yield "token_embd.weight", vocab, width
    yield "output.weight", vocab, width
    yield "output_norm.weight", 0, width
    for i in range(layers):
        for name, rows, cols in (("attn_norm", 0, width), ("attn_q", width, width), ("attn_k", keys, width), ("attn_v", keys, width),
                                 ("attn_output", width, width), ("ffn_norm", 0, width), ("ffn_gate", inner, width),
                                 ("ffn_up", inner, width), ("ffn_down", width, inner)):
            yield f"blk.{i}.{name}.weight", rows, cols


def size_of(rows, cols):
    return rows * cols // GROUP * BLOCK if rows else 4 * cols


def write(path, shape):
    rnd, all_tensors = random.Random(1), list(tensors(shape))
    scale = struct.pack("<e", 0.22 / shape[1] ** 0.5)
    pool = b"".join(scale + rnd.randbytes(16).translate(EVEN) for _ in range(POOL))
    n, about = metadata(shape)
    with open(path, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(all_tensors), n) + about)
        at = 0
        for name, rows, cols in all_tensors:
            dims = [cols, rows] if rows else [cols]
            f.write(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 2 if rows else 0, at))
            at += (size_of(rows, cols) + 31) // 32 * 32
        f.write(bytes(-f.tell() % 32))
        for _, rows, cols in all_tensors:
            left, first = size_of(rows, cols), BLOCK * rnd.randrange(POOL)
            pad = -left % 32
            while rows and left:
                piece = pool[first:first + left]
                f.write(piece)
                left, first = left - len(piece), 0
            f.write(b"" if rows else struct.pack("<f", 1.0) * cols)
            f.write(bytes(pad))


write(sys.argv[2], SHAPES[sys.argv[1]])
