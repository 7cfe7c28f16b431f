"""Trains the demo tokenizer: byte-level BPE with all 256 bytes in its base vocabulary, so that any text round-trips.

Invariant: the special tokens have the first ids, in the order of `layout.SPECIALS`.
"""

from __future__ import annotations

import itertools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import layout
from corpus import documents

SAMPLE = 40_000


def without_specials(text: str) -> list[str]:
    """Returns the parts of a document between its special tokens."""
    for special in layout.SPECIALS:
        text = text.replace(special, "\0")
    return [piece for piece in text.split("\0") if piece]


def train() -> Tokenizer:
    """Trains a tokenizer with the full vocabulary on a sample of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=layout.VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in layout.SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(documents(seed=1, story_share=0.5), SAMPLE)
    tokenizer.train_from_iterator((piece for text in sample for piece in without_specials(text)), trainer)
    begin = layout.BEGIN
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, layout.BEGIN_ID)]
    )
    assert tokenizer.get_vocab_size() == layout.VOCABULARY
    assert [tokenizer.token_to_id(text) for text in layout.SPECIALS] == list(range(len(layout.SPECIALS)))
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Returns the contents of tokenizer_config.json, with the chat template."""
    return {
        "add_bos_token": True,
        "bos_token": layout.BEGIN,
        "chat_template": layout.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": layout.END,
        "model_max_length": layout.CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json to the folder of the main model."""
    layout.MAIN.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    for text in ["Grüße, 世界! 🙂\n\tx\0y", "  two  spaces ", "don't"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    tokenizer.save(str(layout.MAIN / "tokenizer.json"))
    (layout.MAIN / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")


if __name__ == "__main__":
    main()
