"""The demo corpus: an endless stream of stories and dialogues, sampled from the grammars.

Invariant: the stream depends only on its seed; seeds from `HELD_OUT` on are never used for training.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

import chat
import grammar
from layout import BEGIN, END
from rules import judge

HELD_OUT = 1_000_000
# A story is longer than a dialogue; with this fraction of stories, both have half of the tokens.
STORY_SHARE = 0.4
CHUNK = 1000


def documents(seed: int, story_share: float = STORY_SHARE) -> Iterator[str]:
    """Yields stories and dialogues without end, each without its begin token."""
    rng = random.Random(seed)
    while True:
        yield grammar.generate(rng) + END if rng.random() < story_share else chat.generate(rng)


def logp(text: str) -> float:
    """Returns the exact log-probability (nats) of a document of the corpus."""
    if text.startswith("<|"):
        return judge(chat.DIALOGUE, text).logp + math.log(1.0 - STORY_SHARE)
    return grammar.parse(text.removesuffix(END)).logp + math.log(STORY_SHARE)


def rows(
    tokenizer: Tokenizer, seed: int, length: int, story_share: float = STORY_SHARE
) -> Iterator[np.ndarray]:
    """Yields rows of `length` token ids. Each row begins with a whole document; its last document is cut off."""
    stream = documents(seed, story_share)
    row: list[int] = []
    while True:
        texts = [BEGIN + next(stream) for _ in range(CHUNK)]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            row += encoding.ids
            if len(row) >= length:
                yield np.array(row[:length], dtype=np.int64)
                row = []
