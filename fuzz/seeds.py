"""Creates seeds that are not fixtures: small files, and inputs that combine several files. Called by seed.sh.

Usage: seeds.py FIXTURES CORPUS
"""

import base64
import json
import re
import struct
import sys
from pathlib import Path

FIXTURES, CORPUS = map(Path, sys.argv[1:])
# Number of tokens kept of a vocabulary; enough for tokens of every type.
TOKENS = 300
SAFETENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "b": {"dtype": "F16", "shape": [3], "data_offsets": [8, 14]},
    "c": {"dtype": "I8", "shape": [2], "data_offsets": [14, 16]},
}
# dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len
LLAMA2C = (8, 6, 2, 4, 2, 5, 3)
# GGUF's ids of value types.
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def lay(target, name, content):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def safetensors():
    header = json.dumps(SAFETENSORS).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def llama2c(version):
    """Returns a llama2.c file of this version, with tied embeddings."""
    dim, width, layers, heads, kv_heads, vocab, context = LLAMA2C
    head = dim // heads
    norms = (2 * layers + 1) * dim
    matrices = vocab * dim + layers * (2 * dim * dim + 2 * dim * kv_heads * head + 3 * width * dim)
    sizes = struct.pack("<7i", *LLAMA2C)
    if version == 0:
        return sizes + bytes(4 * (norms + matrices + context * head))
    return (struct.pack("<4sI", b"24ka", 1) + sizes + b"\x01").ljust(256, b"\0") + bytes(4 * (norms + matrices))


def gguf(entries):
    """Returns a GGUF file with these metadata entries and no tensors."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries))
    return head + b"".join(text(key) + value(given) for key, given in entries.items())


def text(given):
    given = given.encode()
    return struct.pack("<Q", len(given)) + given


def value(given):
    kind, written = bare(given)
    return struct.pack("<I", kind) + written


def bare(given):
    match given:
        case bool():
            return BOOL, struct.pack("<?", given)
        case int():
            return (U32, struct.pack("<I", given)) if given >= 0 else (I32, struct.pack("<i", given))
        case float():
            return F32, struct.pack("<f", given)
        case str():
            return STRING, text(given)
        case list():
            return ARRAY, array(given)


def array(given):
    floats = any(isinstance(item, float) for item in given)
    items = [bare(float(item) if floats else item) for item in given]
    kind = items[0][0] if items else U32
    return struct.pack("<IQ", kind, len(items)) + b"".join(written for _, written in items)


def vocabulary(keys):
    """Returns the metadata entries of a vocabulary, truncated to its first tokens."""
    entries = {"general.architecture": "llama", "tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    for key, given in keys.items():
        if key == "precompiled_charsmap":
            continue
        short = given[:TOKENS] if isinstance(given, list) else given
        if key == "token_type":
            short = [max(kind, 0) for kind in short]
        entries[f"tokenizer.ggml.{key}"] = short
    return entries


lay("safetensors", "small", safetensors())
for version in (0, 1):
    lay("llama2c", f"small_v{version}", llama2c(version))
for name, keys in json.loads((FIXTURES / "tokenizers/gguf.json").read_text())["vocabularies"].items():
    lay("gguf", name, gguf(vocabulary(keys)))
lay("gguf", "model", (FIXTURES / "gguf/q4_0.gguf").read_bytes())

files = FIXTURES / "tokenizers/files"
rules = struct.pack("<I", 8) + bytes(8) + b"a\0"
normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()}
unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
lay("tokenizer_json", "rules", json.dumps({"version": "1.0", "normalizer": normalizer, "model": unigram}).encode())
lay("vocab_merges", "whole", (files / "vocab.json").read_bytes() + b"\0" + (files / "merges.txt").read_bytes())
lay("vocab_merges", "small", b'{"a": 0, "b": 1, "ab": 2, "<s>": 3}\0#version: 0.2\na b\n')

formulas = {"(2 + 3) * -4 ^ 2 / sqrt(a.b_2) - .5"}
for spec in sorted((FIXTURES / "../../specs").glob("*.toml")):
    formulas |= set(re.findall(r'formula = "([^"]*)"', spec.read_text()))
for at, formula in enumerate(sorted(formulas)):
    lay("formula", str(at), formula.encode())

schemas = (FIXTURES / "../../src/grammar/tests/schemas.jsonl").read_text().splitlines()
for at, schema in enumerate(schemas):
    lay("json_schema", str(at), schema.encode())
for grammar in sorted((FIXTURES / "../../src/grammar/tests/grammars").glob("*.gbnf")):
    lay("grammar", grammar.stem, grammar.read_bytes())
lay("grammar", "tokens", b'start: "a" <[250-256]> | <[256]> "b" | <[*]>\n')
lay("grammar", "nested", b'start: "a" inner\ninner: %lark {\n  start: /[0-9]+/ | "b" start\n}\n')
lay("grammar", "lark", b'start: "a" word\nword: /[a-z]{2,5}/ | %json {"type": "object"}\n')
lay("regex", "number", rb"-?(0|[1-9][0-9]{0,5})(\.[0-9]+)?")
HEAD = bytes([0, 0, 0, 3, 1, 7])
outputs = [
    '<think>Hm</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    '[TOOL_CALLS]f[ARGS]{"a": "\\u00e9"}',
    "[f(a=1, b='x', c=[None])]",
    "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
    '```json\n{"name": "f", "arguments": {}}\n```\n',
]
for format in range(17):
    for at, output in enumerate(outputs):
        lay("output_parser", f"{format}_{at}", bytes([format]) + HEAD[1:] + output.encode())

lay("saved_model", "small", safetensors())

# Model, endpoint, and the length of the answer, which follows.
HI = bytes([2]) + b"Hi"
CALL = b'{"name": "f"}'
CALL = bytes([len(CALL)]) + CALL
tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
image = {"type": "image_url", "image_url": {"url": "data:,"}}
completion = {"model": "m", "prompt": "ab", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 1}
message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
answered = [{"role": "system", "content": "s"}, message, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "2"}]
# The kinds of models, by the first byte modulo 3, and their endpoints, by the rest.
COMPLETE, CHAT, TOKENIZE, DETOKENIZE, TRANSLATE, EMBED, FILL = 0, 3, 6, 9, 1, 2, 5
requests = [
    (COMPLETE, completion),
    (COMPLETE, {"prompt": ["a", "b"], "n": 2, "best_of": 3, "logprobs": 2, "echo": True, "stop": ["x", "y"]}),
    (COMPLETE, {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"7": -1}}),
    (COMPLETE, {"prompt": "a", "suffix": "b", "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True}),
    (COMPLETE, {"prompt": "a", "use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": "never"}),
    (COMPLETE, {"prompt": "a", "prompt_logprobs": 2, "max_tokens": 0, "guided_regex": "[ab]+"}),
    (COMPLETE, {"prompt": "a", "mirostat": 2, "dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9,
                "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words": ["z"], "min_p": 0.05}),
    (CHAT, {"messages": [message], "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": answered, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}),
    (CHAT, {"messages": [message], "tools": [tool], "stream": True, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (CHAT, {"messages": [message], "response_format": {"type": "json_schema", "json_schema": {
        "name": "s", "strict": True, "schema": tool["function"]["parameters"]}}}),
    (CHAT, {"messages": [{"role": "user", "content": [image]}], "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": [message, {"role": "assistant", "content": "x"}], "continue_final_message": True,
            "add_generation_prompt": False}),
    (TOKENIZE, {"prompt": "a<s>", "add_special_tokens": False, "return_token_strs": True}),
    (TOKENIZE, {"messages": [message]}),
    (DETOKENIZE, {"tokens": [1, 256, 200]}),
    (TRANSLATE, {"prompt": "ab", "source_lang": "en", "forced_bos_token": "__en__", "decoder_prompt": "c"}),
    (EMBED, {"input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 2}),
    (FILL, {"inputs": "a<mask>", "input": "a<mask>", "top_k": 2}),
]
for at, (choice, body) in enumerate(requests):
    for name, answer in (("text", HI), ("call", CALL)):
        lay("request", f"{at}_{name}", bytes([choice]) + answer + json.dumps(body).encode())

lay("event_stream", "chunk", b'\x03: comment\r\n\r\nevent: e\ndata: {"a": 1}\ndata:b\n\ndata: [DONE]\n\n')
lay("settings", "config", b"\0" + (FIXTURES / "../../config/mainstem.toml").read_bytes())
for example in sorted((FIXTURES / "../../config/examples").glob("*.toml")):
    lay("settings", example.stem, b"\0" + example.read_bytes())
lay("settings", "keys", b"\x03# comment\nsk-1\n  sk-2\r\n")
CLIENT = "class=batch weight=2 max_sequences=8 tokens_per_minute=60000 requests_per_minute=120 priority=yes"
lay("settings", "clients", f"\x03sk-1 name=alice {CLIENT}\nsk-2 weight=1000 priority=no\nsk-3 class=interactive\n".encode())
FAULTS = "fail@100, panic/cpu:1@7, hang@0.001:5s, slow/0@0.5:200ms, nan@1.0, seed=9"
lay("settings", "faults", f'''\0[device]
groups = "0;1"
step_timeout = "1s"
[faults]
enabled = true
inject = "{FAULTS}"
'''.encode())
lay("settings", "hardware", b'\x04[[device]]\nname = "a"\nbandwidth_gb_s = 10\ntflops = 1\nmemory_gb = 4\n')
lay("settings", "rules", b"\x05model.layers.{i}.mlp.*=q4_K, down=q8_0,q4_0")
lay("settings", "hub", b"\x06hf:owner/name@main")
lay("settings", "shape", b"\x07llama-1.1b")
lay("settings", "bytes", b"\x074.5MiB")
lay("settings", "duration", b"\x07250ms")
