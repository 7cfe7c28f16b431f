"""The libraries of the vocabularies, each with `encode`, and some with `decoded`.

Invariant: ids are those of the library. What a tokenizer class adds (special tokens in texts, moved ids) is added
around the call.
"""

import base64
import json
import random
import re
import shutil
import tempfile
import unicodedata
from pathlib import Path

import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2 as protobuf
from tokenizer_vocabularies import FILES, changed

class Pieces:
    """A sentencepiece model. Special tokens in texts are matched first, as tokenizer classes do."""

    def __init__(self, model: protobuf.ModelProto, specials: dict[str, int], prefix="always", move=lambda id: id):
        self.first = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        later = changed(model)
        if prefix == "first":
            later.normalizer_spec.add_dummy_prefix = False
        self.later = sentencepiece.SentencePieceProcessor(model_proto=later.SerializeToString())
        self.specials, self.move = specials, move
        names = sorted(specials, key=len, reverse=True)
        # A mask token includes the spaces before it.
        self.pattern = re.compile("|".join(rf"\s*{n}" if n == "<mask>" else re.escape(n) for n in names))

    def encode(self, text: str) -> list[int]:
        ids, begin = [], 0
        for match in self.pattern.finditer(text):
            ids += self.part(text[begin : match.start()], begin)
            ids.append(self.specials[match.group().lstrip() if match.group().endswith("<mask>") else match.group()])
            begin = match.end()
        return ids + self.part(text[begin:], begin)

    def part(self, text: str, begin: int) -> list[int]:
        return [self.move(id) for id in (self.first if begin == 0 else self.later).encode(text)]

    def decoded(self, dice: random.Random) -> list:
        """Returns random ids with their texts: any pieces except the unknown one, and the bytes of whole characters."""
        size = self.first.get_piece_size()
        known = [id for id in range(size) if not self.first.is_unknown(id) and not self.first.is_byte(id)]
        parts = [[id] for id in known] * 2
        parts += [[self.first.piece_to_id(f"<0x{byte:02X}>") for byte in "\u20ac\U0001f600".encode()]] * (size // 9)
        parts = [part for part in parts if not any(self.first.is_unknown(id) for id in part)]
        drawn = [sum((dice.choice(parts) for _ in range(dice.randrange(1, 9))), []) for _ in range(30)]
        return [[ids, self.first.decode(ids)] for ids in drawn]


class PlainPieces(Pieces):
    """A sentencepiece model for texts whose space is all alike and whose letters are lower and have no accents."""

    SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")

    def part(self, text: str, begin: int) -> list[int]:
        text = unicodedata.normalize("NFKD", text.replace("``", '"').replace("''", '"'))
        text = "".join(c for c in text if not unicodedata.category(c).startswith("M")).lower()
        return super().part(self.SPACE.sub(" ", text), begin)


class Transformers:
    """A folder without tokenizer.json, read by transformers."""

    def __init__(self, kind: str, files: dict):
        import transformers

        with tempfile.TemporaryDirectory() as folder:
            lay(Path(folder), files)
            self.tokenizer = getattr(transformers, kind).from_pretrained(folder)

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decoded(self, dice: random.Random) -> list:
        """Returns random ids with their texts, without the special tokens."""
        decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return drawn(dice, len(self.tokenizer), decode)


class Ranks:
    """A tiktoken encoding."""

    def __init__(self, pattern: str, specials: dict[str, int], composes=False):
        lines = (FILES / "ranks.tiktoken").read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        self.encoding = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.composes = composes

    def encode(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self.composes else text
        return self.encoding.encode(text, allowed_special="all")

    def decoded(self, dice: random.Random) -> list:
        return drawn(dice, self.encoding.max_token_value + 1, self.encoding.decode)


class LlamaCpp:
    """A GGUF file, read by llama.cpp."""

    def __init__(self, vocabulary: dict):
        import llama_cpp

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            write_gguf(path, vocabulary)
            self.model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=special, special=True)


def drawn(dice: random.Random, size: int, decode) -> list:
    """Returns random ids with their texts."""
    sequences = [[dice.randrange(size) for _ in range(dice.randrange(1, 10))] for _ in range(30)]
    return [[ids, decode(ids)] for ids in sequences]


def lay(folder: Path, files: dict) -> None:
    """Creates a model folder: copies files, and writes settings as JSON."""
    for name, source in files.items():
        if isinstance(source, str):
            shutil.copy(FILES / source, folder / name)
        else:
            (folder / name).write_text(json.dumps(source))


def write_gguf(path: Path, vocabulary: dict) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in vocabulary.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif key == "precompiled_charsmap":
            writer.add_array(name, bytes(value))
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
