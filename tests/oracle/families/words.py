"""The tokenizer of all families' fixtures: one id per word, with special tokens and language codes first.

Invariant: there are exactly VOCAB entries, as many as in the smallest vocabulary of any fixture.
"""

VOCAB = 96
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", "__en__", "__de__", "__fr__"]
WORDS = (
    "the a of and to in is was it on as with by at from this that for are be or an which one had not but all were "
    "when we there can out other if will up about each how their then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water been call who oil its "
    "now find long down day did get come made may part rain river"
).split()
assert len(SPECIALS) + len(WORDS) == VOCAB, len(SPECIALS) + len(WORDS)


def tokenizer() -> dict:
    """Returns tokenizer.json: words are separated by spaces, and nothing is added around them."""
    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *WORDS])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, content) for i, content in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def added_token(i: int, content: str) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": content, **flags}


def tokenizer_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "additional_special_tokens": ["__en__", "__de__", "__fr__"],
    }
