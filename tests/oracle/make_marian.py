"""Writes tests/fixtures/tokenizers/marian.json: the results of transformers for a Marian tokenizer.

    python tests/oracle/make_marian.py

Its sentencepiece models are those of `files/`; the vocabulary has the pieces of both, in another order.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
import transformers

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "tokenizers"
SOURCE, TARGET = "unigram.model", "bare.model"
UNLISTED = "\u2581of"  # a piece of both models that is not in the vocabulary


def main() -> None:
    files = [FIXTURES / "files" / name for name in (SOURCE, TARGET)]
    models = [sentencepiece.SentencePieceProcessor(model_file=str(file)) for file in files]
    pieces = {model.id_to_piece(i) for model in models for i in range(model.get_piece_size())}
    pieces -= {"</s>", "<unk>", "<s>", "<pad>", UNLISTED}
    random = np.random.default_rng(7)
    tokens = ["</s>", "<unk>", ">>fra<<", *random.permutation(sorted(pieces)).tolist(), "<pad>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.json"
        vocabulary.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        tokenizer = transformers.MarianTokenizer(str(files[0]), str(files[1]), str(vocabulary))
        texts = [*json.loads((FIXTURES / "texts.json").read_text()), ">>fra<< the rain"]
        some = [random.integers(3, len(tokens) - 1, 12).tolist() for _ in range(20)]
        recorded = {
            "source": SOURCE,
            "target": TARGET,
            "tokens": tokens,
            "encoded": [{"text": text, "ids": tokenizer.encode(text)} for text in texts],
            "decoded": [{"ids": ids, "text": tokenizer.decode(ids)} for ids in some],
        }
    lines = {key: json.dumps(value, ensure_ascii=False, separators=(",", ":")) for key, value in recorded.items()}
    text = ",\n".join(f" {json.dumps(key)}:{value}" for key, value in lines.items())
    (FIXTURES / "marian.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
