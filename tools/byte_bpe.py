"""A byte-level BPE vocabulary built by a rule instead of training, and its tokenizer.json.

Ids are in this order: the special tokens, the 256 bytes in byte order, then one token per merge. Every text can be
encoded and decoded.

Invariant: token `n_specials + 256 + m` is the concatenation of the two parts of merge m, so vocabulary and merges
always agree.
"""

import itertools
import string
from dataclasses import dataclass


def byte_alphabet() -> list[str]:
    """Returns the printable characters that represent the bytes 0..255 in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


SPACE = byte_alphabet()[ord(" ")]


def letter_merges():
    """Yields merges in rank order: two letters, a space before such a pair, then two pairs. About 458,000 in total."""
    pairs = list(itertools.product(string.ascii_lowercase, repeat=2))
    yield from pairs
    joined = [a + b for a, b in pairs]
    yield from ((SPACE, pair) for pair in joined)
    yield from itertools.product(joined, repeat=2)


@dataclass
class Vocabulary:
    """`tokens[id]` is a token's spelling in the byte alphabet; the first `n_specials` ids are special tokens."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    n_specials: int

    def tokenizer_json(self, bos: str | None) -> dict:
        """Returns the contents of tokenizer.json; with `bos`, that token is added before every encoded text."""
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": id,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for id, token in enumerate(self.tokens[: self.n_specials])
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level(),
            "post_processor": prepend(bos, self.tokens.index(bos)) if bos else None,
            "decoder": byte_level(),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: id for id, token in enumerate(self.tokens)},
                "merges": [list(pair) for pair in self.merges],
            },
        }


def byte_level() -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def prepend(token: str, id: int) -> dict:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }


def build(size: int, specials: list[str], ranked=None) -> Vocabulary:
    """Builds a vocabulary of exactly `size` tokens from the first of the `ranked` merges (by default
    `letter_merges`)."""
    n_merges = size - len(specials) - 256
    assert n_merges >= 0, f"a byte-level vocabulary needs at least {len(specials) + 256} tokens"
    merges = list(itertools.islice(ranked or letter_merges(), n_merges))
    assert len(merges) == n_merges, f"the merge rule ends before {size} tokens"
    return Vocabulary([*specials, *byte_alphabet(), *(a + b for a, b in merges)], merges, len(specials))
