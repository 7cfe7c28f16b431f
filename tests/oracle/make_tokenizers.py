"""Writes tests/fixtures/tokenizers: small vocabularies of every kind, and the ids that their own libraries produce.

    python tests/oracle/make_tokenizers.py                          # the small ones
    python tests/oracle/make_tokenizers.py --whole FOLDER           # and ids with the full-size ones in FOLDER

`files/` contains vocabularies, `texts.json` the texts to encode, `folders.json` model folders (made from those files
and from settings in it) with their ids, and `gguf.json` vocabularies as in GGUF files with llama.cpp's ids.
`whole.json` contains ids with vocabularies that are too large for the repository; tests/vocabularies uses them.

Invariant: ids come from sentencepiece, transformers, tiktoken and llama.cpp. Only if a library lacks what a tokenizer
class adds (special tokens in texts, moved ids), it is added here, next to the call.
"""

import argparse
import json
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2 as protobuf
from tokenizer_folders import fairseq_folders, library_folders, rank_folders, scored_folders
from tokenizer_libraries import LlamaCpp, Pieces, Transformers
from tokenizer_texts import TEXTS
from tokenizer_vocabularies import FILES, FIXTURES, controls, make_byte_pairs, make_models, make_words, model


def scored_gguf(proto: protobuf.ModelProto, kind: str, **more) -> dict:
    return {
        "model": kind,
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        **more,
    }


def pairs_gguf() -> dict:
    vocabulary = json.loads((FILES / "vocab.json").read_text())
    specials = {"<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"}
    merges = (FILES / "merges.txt").read_text().splitlines()
    return {
        "model": "gpt2",
        "tokens": sorted(vocabulary, key=vocabulary.get),
        "token_type": [3 if token in specials else 1 for token in sorted(vocabulary, key=vocabulary.get)],
        "merges": [line for line in merges if not line.startswith("#version")],
        "bos_token_id": 5,
        "eos_token_id": 5,
    }


def words_gguf() -> dict:
    tokens = (FILES / "vocab.txt").read_text().splitlines()
    specials = {"[PAD]": 3, "[UNK]": 2, "[CLS]": 3, "[SEP]": 3, "[MASK]": 3}
    marked = lambda token: token if token in specials else token[2:] if token.startswith("##") else "\u2581" + token
    return {
        "model": "bert",
        "tokens": [marked(token) for token in tokens],
        "token_type": [specials.get(token, 1) for token in tokens],
        "cls_token_id": tokens.index("[CLS]"),
        "bos_token_id": tokens.index("[CLS]"),
        "seperator_token_id": tokens.index("[SEP]"),
        "unknown_token_id": tokens.index("[UNK]"),
    }


def gguf_cases() -> dict:
    """Returns vocabularies, and cases that change some keys of one of them."""
    unigram = model("unigram.model")
    vocabularies = {
        "pieces": scored_gguf(model("bpe.model"), "llama", unknown_token_id=0, bos_token_id=1, eos_token_id=2),
        "unigram": scored_gguf(
            unigram,
            "t5",
            unknown_token_id=0,
            eos_token_id=2,
            add_space_prefix=True,
            remove_extra_whitespaces=True,
            precompiled_charsmap=list(unigram.normalizer_spec.precompiled_charsmap),
        ),
        "words": words_gguf(),
        "pairs": pairs_gguf(),
    }
    ends = {"bos_token_id": 0, "eos_token_id": 2, "add_bos_token": True, "add_eos_token": True}
    cases = [
        ("llama", "pieces", {}),
        ("llama, no prefix", "pieces", {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}),
        ("t5", "unigram", {}),
        ("bert", "words", {}),
        ("roberta", "pairs", {"pre": "roberta-bpe", **ends}),
        *((pre, "pairs", {"pre": pre}) for pre in PRE),
    ]
    answered = []
    for name, base, keys in cases:
        library = LlamaCpp(vocabularies[base] | keys)
        plain, around = library.encode("x"), library.encode("x", special=True)
        at = next(i for i in range(len(around)) if around[i : i + len(plain)] == plain)
        ids = [library.encode(text) for text in TEXTS]
        around = {"before": around[:at], "after": around[at + len(plain) :]}
        answered.append({"name": name, "vocabulary": base, "keys": keys, "ids": ids, **around})
    return {"vocabularies": vocabularies, "cases": answered}


# One of each pre-tokenizer.
PRE = [
    "default",
    "gpt-2",
    "llama-bpe",
    "qwen2",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "falcon",
    "starcoder",
    "tekken",
    "gpt-4o",
    "bloom",
    "viking",
]


def whole_answers(folder: Path) -> dict:
    """Returns ids with the vocabularies in the folder."""
    answered = {}
    for path in sorted((folder / "mistral").glob("*.model*")):
        proto = protobuf.ModelProto()
        proto.ParseFromString(path.read_bytes())
        ids = [Pieces(proto, controls(proto)).encode(text) for text in TEXTS]
        source = {"name": "tokenizer.model", "source": f"mistral/{path.name}"}
        answered[path.name] = source | {"settings": {"tokenizer_class": "LlamaTokenizer"}, "ids": ids}
    for name, lowers in (("bert-base-uncased", True), ("bert-base-cased", False)):
        source = {"name": "vocab.txt", "source": f"{name}/vocab.txt"}
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowers}
        files = {"vocab.txt": str(folder / name / "vocab.txt"), "tokenizer_config.json": settings}
        library = Transformers("BertTokenizer", files)
        ids = [library.encode(text) for text in TEXTS]
        answered[name] = source | {"settings": settings, "ids": ids}
    return answered


def write(name: str, value) -> None:
    """Writes JSON with each list of plain values on one line."""

    def lines(value, indent: str) -> str:
        nested = isinstance(value, (list, dict)) and any(
            isinstance(part, (list, dict)) for part in (value.values() if isinstance(value, dict) else value)
        )
        if not nested and not (isinstance(value, list) and value is TEXTS):
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if isinstance(value, dict):
            parts = [
                f"{json.dumps(key, ensure_ascii=False)}:{lines(part, indent + ' ')}" for key, part in value.items()
            ]
            return "{\n" + ",\n".join(f"{indent} {part}" for part in parts) + f"\n{indent}}}"
        return "[\n" + ",\n".join(f"{indent} {lines(part, indent + ' ')}" for part in value) + f"\n{indent}]"

    (FIXTURES / name).write_text(lines(value, "") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", type=Path, help="folder with full-size vocabularies")
    given = parser.parse_args()
    FILES.mkdir(parents=True, exist_ok=True)
    make_models()
    make_byte_pairs()
    make_words()
    write("texts.json", TEXTS)
    write("folders.json", scored_folders() + fairseq_folders() + library_folders() + rank_folders())
    write("gguf.json", gguf_cases())
    if given.whole:
        write("whole.json", whole_answers(given.whole))


if __name__ == "__main__":
    main()
