"""The small vocabularies of tests/fixtures/tokenizers/files.

Invariant: the same versions of the libraries make the same files.
"""

import base64
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as protobuf
from tokenizer_texts import CORPUS

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "tokenizers"
FILES = FIXTURES / "files"

# Normalization rules of the models, as code points: ligatures, full-width forms, joined and deleted characters, spaces.
RULES = """
FB01\t66 69
FB03\t66 66 69
2122\t54 4D
2460\t31
00BD\t31 2F 32
FF21\t41
FF42\t62
FF76 FF9E\t30AC
304B 3099\t304C
0065 0301\t00E9
006F 0308\t00F6
3000\t20
00A0\t20
2003\t20
09\t20
0A\t20
0D\t20
200B\t
FEFF\t
AD\t20 20
"""


# The first pieces of DeBERTa's models.
DEBERTA = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


def train_pieces(name: str, kind: str, size: int, **options) -> protobuf.ModelProto:
    """Trains a sentencepiece model."""
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text(RULES.lstrip())
        if options.pop("rules", False):
            options["normalization_rule_tsv"] = str(rules)
        else:
            options["normalization_rule_name"] = "identity"
        prefix = Path(folder) / "model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_prefix=str(prefix),
            model_type=kind,
            vocab_size=size,
            character_coverage=0.99,
            num_threads=1,
            minloglevel=2,
            **options,
        )
        model = protobuf.ModelProto()
        model.ParseFromString(prefix.with_suffix(".model").read_bytes())
    model.trainer_spec.ClearField("input")
    model.trainer_spec.ClearField("model_prefix")
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    return write_model(name, model)


def write_model(name: str, model: protobuf.ModelProto) -> protobuf.ModelProto:
    (FILES / name).write_bytes(model.SerializeToString(deterministic=True))
    return model


def changed(model: protobuf.ModelProto) -> protobuf.ModelProto:
    copy = protobuf.ModelProto()
    copy.CopyFrom(model)
    return copy


def make_models() -> None:
    keeps = {"byte_fallback": True, "remove_extra_whitespaces": False}
    keeps["control_symbols"] = ["<|im_start|>", "<|im_end|>"]
    bpe = train_pieces("bpe.model", "bpe", 900, user_defined_symbols=["<tool>", "</tool>"], **keeps)
    # Few different scores, so that most merges tie; and pieces that are only intermediate steps of merges.
    tied = changed(bpe)
    dice = random.Random(5)
    for piece in tied.pieces:
        if piece.type == 1:
            piece.score = -float(dice.randrange(4))
            if len(piece.piece) > 1 and dice.random() < 0.15:
                piece.type = 5
    tied.normalizer_spec.add_dummy_prefix = False
    write_model("tied.model", tied)
    train_pieces("unigram.model", "unigram", 390, rules=True, pad_id=-1)
    special = {f"{role}_id": id for id, role in enumerate(("pad", "bos", "eos", "unk"))}
    named = {f"{role}_piece": name for role, name in zip(("pad", "bos", "eos", "unk"), DEBERTA)}
    train_pieces("deberta.model", "unigram", 390, rules=True, **special, **named)
    special = {"pad_id": 0, "pad_piece": "<pad>", "unk_id": 1, "bos_id": -1, "eos_id": -1}
    controls = ["[CLS]", "[SEP]", "[MASK]"]
    train_pieces("albert.model", "unigram", 390, rules=True, control_symbols=controls, **special)
    bare = train_pieces("bare.model", "bpe", 600, rules=True, bos_id=-1, eos_id=1, unk_id=2, pad_id=0)
    assert not bare.trainer_spec.byte_fallback
    symbols = ["<tool>", "</tool>", "th"]
    fallback = train_pieces("fallback.model", "unigram", 640, user_defined_symbols=symbols, **keeps)
    for piece in fallback.pieces[300::7]:
        if piece.type == 1 and len(piece.piece) > 1:
            piece.type = 5
    write_model("fallback.model", fallback)


def make_byte_pairs() -> None:
    """Writes vocab.json, merges.txt, and the same as ranks."""
    trained = tokenizers.ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    trained.train_from_iterator(CORPUS, vocab_size=1000, special_tokens=specials, show_progress=False)
    trained.save_model(str(FILES))
    vocabulary = json.loads((FILES / "vocab.json").read_text())
    by_id = sorted(vocabulary, key=vocabulary.get)
    ordered = {token: vocabulary[token] for token in by_id}
    (FILES / "vocab.json").write_text(json.dumps(ordered, ensure_ascii=False, indent=0))
    letters = {character: byte for byte, character in byte_letters().items()}
    tokens = [bytes(letters[c] for c in token) for token in by_id[len(specials) :]]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (FILES / "ranks.tiktoken").write_text("\n".join(lines) + "\n")


def byte_letters() -> dict[int, str]:
    """Returns the printable character of every byte, as in GPT-2."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def make_words() -> None:
    """Writes vocab.txt: every character, and the most frequent words and parts of words."""
    words = Counter(re.findall(r"\w+|[^\w\s]", " ".join(text for line in CORPUS for text in (line, line.lower()))))
    parts = Counter()
    for word, count in words.items():
        for end in range(1, len(word)):
            parts[word[:end]] += count
            parts["##" + word[end:]] += count
    characters = sorted({character for word in words for character in word})
    often = lambda counted: sorted(counted, key=lambda text: (-counted[text], text))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    tokens = dict.fromkeys(tokens + often(words)[:150] + often(parts)[:250])
    (FILES / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))


def model(name: str) -> protobuf.ModelProto:
    proto = protobuf.ModelProto()
    proto.ParseFromString((FILES / name).read_bytes())
    return proto


def controls(proto: protobuf.ModelProto) -> dict[str, int]:
    return {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type in (2, 3)}
