"""Model folders without a tokenizer.json, and the ids that their tokenizers' libraries produce for the texts.

Invariant: a case has the files of its folder, the ids of every text, and the ids added before and after a text.
"""

import json
import random

from tokenizer_libraries import Pieces, PlainPieces, Ranks, Transformers
from tokenizer_texts import TEXTS
from tokenizer_vocabularies import FILES, controls, model

CL100K = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
OWN_PATTERN = r"""\p{L}+|\p{N}{1,2}|[^\s\p{L}\p{N}]+|\s"""


def moved(id: int) -> int:
    """Returns the id in fairseq of the piece with this id in sentencepiece."""
    return {0: 3, 1: 0, 2: 2}.get(id, id + 1)


def answers(name: str, files: dict, library, around: list[list[int]], decodes=False, **more) -> dict:
    ids = [library.encode(text) for text in TEXTS]
    decoded = library.decoded(random.Random(name)) if decodes else []
    around = {"before": around[0], "after": around[1]}
    return {"name": name, "files": files, "ids": ids, **around, "decoded": decoded, **more}


def pair_of(kind: str, files: dict, library: Pieces) -> list:
    """Returns two texts and their ids. Checks that transformers has the ids of every text in which nothing is
    rewritten: its newer versions do not have the models' normalization."""
    tokenizer = Transformers(kind, files)
    plain = [text for text in TEXTS if text.isascii() and text.isprintable()]
    assert len(plain) > 15
    for text in plain:
        assert library.encode(text) == tokenizer.encode(text), (kind, text)
    return ["one of them", "the other", tokenizer.tokenizer.encode("one of them", "the other")]


def folder(name: str, file: str, **config) -> dict:
    """Returns a folder with a model and its settings."""
    return {file: name, "tokenizer_config.json": config}


def scored_folders() -> list[dict]:
    """Returns folders with sentencepiece models whose ids are the positions of the pieces."""
    bpe, tied, bare, fallback = (model(f"{name}.model") for name in ("bpe", "tied", "bare", "fallback"))
    llama = "LlamaTokenizer"
    first = {"content": "<|im_start|>", "special": True}
    cases = [
        answers("llama", {"tokenizer.model": "bpe.model"}, Pieces(bpe, controls(bpe)), [[1], []], True, bos=1, eos=2),
        answers(
            "llama, not legacy",
            folder("bpe.model", "tokenizer.model", tokenizer_class=llama, legacy=False, add_bos_token=False),
            Pieces(bpe, controls(bpe), prefix="first"),
            [[], []],
        ),
        answers(
            "ties, no prefix, EOS",
            folder("tied.model", "tokenizer.model", tokenizer_class="BaichuanTokenizer", add_eos_token=True),
            Pieces(tied, controls(tied)),
            [[1], [2]],
            True,
        ),
        answers(
            "unigram, bytes",
            folder(
                "fallback.model",
                "tokenizer.model",
                tokenizer_class="OtherTokenizer",
                added_tokens_decoder={
                    "3": first,
                    str(len(fallback.pieces)): {"content": "<|endoftext|>", "special": True},
                },
                eos_token="<|endoftext|>",
            ),
            Pieces(fallback, controls(fallback) | {"<|endoftext|>": len(fallback.pieces)}),
            [[1], []],
            eos=len(fallback.pieces),
        ),
    ]
    size = len(bare.pieces)
    extra = {f"<extra_id_{i}>": size + 2 - i for i in range(3)}
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3, "eos_token": "</s>"}
    cases.append(
        answers(
            "t5",
            {"spiece.model": "bare.model", "tokenizer_config.json": config},
            Pieces(bare, controls(bare) | extra),
            [[], [1]],
            True,
            eos=1,
            tokens={"<extra_id_0>": size + 2, "<extra_id_2>": size},
        )
    )
    deberta = model("deberta.model")
    files = folder("deberta.model", "spm.model", do_lower_case=False, vocab_type="spm")
    files["config.json"] = {"model_type": "deberta-v2"}
    mask = len(deberta.pieces)
    library = Pieces(deberta, controls(deberta) | {"[MASK]": mask})
    pair = pair_of("DebertaV2Tokenizer", files, library)
    cases.append(answers("deberta", files, library, [[1], [2]], tokens={"[MASK]": mask}, pair=pair))
    albert = model("albert.model")
    files = {"spiece.model": "albert.model", "config.json": {"model_type": "albert"}}
    library = PlainPieces(albert, controls(albert))
    pair = pair_of("AlbertTokenizer", files, library)
    cases.append(answers("albert", files, library, [[2], [3]], tokens={"[MASK]": 4}, pair=pair))
    five = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"]
    size = len(bpe.pieces)
    cases.append(
        answers(
            "chatglm",
            folder("bpe.model", "tokenizer.model", tokenizer_class="ChatGLMTokenizer"),
            Pieces(bpe, controls(bpe) | {name: size + i for i, name in enumerate(five)}),
            [[size + 1, size + 3], []],
        )
    )
    return cases


def fairseq_folders() -> list[dict]:
    """Returns folders with sentencepiece models whose pieces have other ids."""
    unigram = model("unigram.model")
    size = len(unigram.pieces) + 1
    own = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    languages = ["deu_Latn", "eng_Latn"]
    fairseq = lambda more: Pieces(unigram, own | {name: size + i for i, name in enumerate(more)}, move=moved)
    file = "sentencepiece.bpe.model"
    cases = [
        answers(
            "xlm-roberta",
            {file: "unigram.model", "config.json": {"model_type": "xlm-roberta"}},
            fairseq(["<mask>"]),
            [[0], [2]],
            pair=pair_of("XLMRobertaTokenizer", {file: "unigram.model"}, fairseq(["<mask>"])),
        ),
        answers(
            "nllb",
            folder("unigram.model", file, tokenizer_class="NllbTokenizer")
            | {"special_tokens_map.json": {"additional_special_tokens": languages}},
            fairseq([*languages, "<mask>"]),
            [[size + 1], [2]],
        ),
        answers(
            "mbart",
            folder(
                "unigram.model",
                file,
                tokenizer_class="MBartTokenizer",
                src_lang="de_DE",
                additional_special_tokens=["en_XX", "de_DE"],
            ),
            fairseq(["en_XX", "de_DE", "<mask>"]),
            [[], [2, size + 1]],
        ),
    ]
    renamed = {name + "NOTUSED": id for name, id in (("<s>", 0), ("</s>", 2), ("<unk>", 4))}
    renamed |= {"<pad>": 1, "<unk>": 3, "<s>": 5, "</s>": 6, "<mask>": size + 3}
    library = Pieces(unigram, renamed, move=lambda id: 3 if id == 0 else id + 4)
    files = folder("unigram.model", file, tokenizer_class="CamembertTokenizer")
    pair = pair_of("CamembertTokenizer", files, library)
    cases.append(answers("camembert", files, library, [[5], [6]], tokens={"<mask>": size + 3}, pair=pair))
    # Ids from a separate file: the pieces in reverse order, without every tenth one.
    names = [piece.piece for piece in unigram.pieces[3:]]
    kept = [name for at, name in enumerate(names) if at % 10]
    ids = own | {name: 4 + at for at, name in enumerate(reversed(kept))}
    there = len(ids)
    cases.append(
        answers(
            "m2m100",
            folder(
                "unigram.model",
                file,
                tokenizer_class="M2M100Tokenizer",
                src_lang="de",
                additional_special_tokens=["__en__", "__de__"],
            )
            | {"vocab.json": ids},
            Pieces(
                unigram,
                own | {"__en__": there, "__de__": there + 1},
                move=lambda id: {0: 3, 1: 0, 2: 2}.get(id) if id < 3 else ids.get(names[id - 3], 3),
            ),
            [[there + 1], [2]],
        )
    )
    return cases


def library_folders() -> list[dict]:
    """Returns folders that transformers reads in the same way as Mainstem."""
    pairs = {"vocab.json": "vocab.json", "merges.txt": "merges.txt"}
    words = {"vocab.txt": "vocab.txt"}
    cases = []

    def case(name: str, kind: str, files: dict, around=None, decodes=False, **config):
        config = {"tokenizer_class": kind, **config}
        files = {**files, "tokenizer_config.json": config}
        library = Transformers(kind, files)
        opening = library.encode("x", special=True)
        plain = library.encode("x")
        at = next(i for i in range(len(opening)) if opening[i : i + len(plain)] == plain)
        found = [opening[:at], opening[at + len(plain) :]]
        cases.append(answers(name, files, library, around or found, decodes))

    end = "<|endoftext|>"
    case("gpt2", "GPT2Tokenizer", pairs, decodes=True)
    # transformers adds BOS with a separate template, which is not used here.
    case(
        "opt",
        "GPT2Tokenizer",
        pairs,
        [[2], []],
        add_bos_token=True,
        add_prefix_space=True,
        bos_token="</s>",
        eos_token="</s>",
        unk_token="</s>",
        pad_token="<pad>",
    )
    # Newer versions of transformers no longer know that this token includes the spaces before it.
    mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "special": True}
    case("roberta", "RobertaTokenizer", pairs, mask_token=mask)
    size = len(json.loads((FILES / "vocab.json").read_text()))
    added = {"5": {"content": end, "special": True}, str(size): {"content": "<|im_start|>", "special": True}}
    added[str(size + 1)] = {"content": "<tool>"}
    case("qwen2", "Qwen2Tokenizer", pairs, added_tokens_decoder=added, eos_token=end)
    case("bert", "BertTokenizer", words, decodes=True)
    case("bert, cased", "BertTokenizer", words, decodes=True, do_lower_case=False)
    case("bert, accents kept", "BertTokenizer", words, strip_accents=False, tokenize_chinese_chars=False)
    return cases


def rank_folders() -> list[dict]:
    size = len((FILES / "ranks.tiktoken").read_text().splitlines())
    named = lambda *names: {name: size + i for i, name in enumerate(names)}
    file = {"x.tiktoken": "ranks.tiktoken"}
    decoder = lambda specials: {str(id): {"content": name, "special": True} for name, id in specials.items()}
    own = named("<|endoftext|>", "<s>")
    qwen = named("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
    return [
        answers("ranks alone", {"tokenizer.model": "ranks.tiktoken"}, Ranks(CL100K, {}), [[], []], True),
        answers(
            "qwen",
            {"qwen.tiktoken": "ranks.tiktoken", "tokenizer_config.json": {"tokenizer_class": "QWenTokenizer"}},
            Ranks(QWEN, qwen, composes=True),
            [[], []],
            eos=size,
        ),
        answers(
            "own pattern",
            file
            | {
                "tokenizer_config.json": {
                    "tokenizer_class": "OwnTokenizer",
                    "pat_str": OWN_PATTERN,
                    "added_tokens_decoder": decoder(own),
                    "bos_token": "<s>",
                    "eos_token": "<|endoftext|>",
                    "add_bos_token": True,
                    "add_eos_token": True,
                }
            },
            Ranks(OWN_PATTERN, own),
            [[size + 1], [size]],
            bos=size + 1,
            eos=size,
        ),
    ]
