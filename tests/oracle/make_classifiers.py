"""Makes tests/fixtures/classifiers: tiny random checkpoints with classifiers, and an embedding model with dense modules,
and what transformers and sentence-transformers compute for some texts.

    python tests/oracle/make_classifiers.py [NAME ...]

Each folder has the model's files and answers.json: `texts[]` with the words of one or two texts, their ids and token
types, and the logits of the labels, or of the labels of each token. All share the words of one tokenizer, with the
template of their family.

Invariant: every weight is random, including norms and biases, and every text has logits of its own.
"""

import json
import sys
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "classifiers"
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
WORDS = "no yes what is a panda the giant bear of china paris capital france city it eats bamboo lives in big and".split()
VOCAB = 40
TEXTS = [
    ("what is panda",),
    ("what is a panda", "the giant panda is a bear of china"),
    ("what is a panda", "paris is the capital city of france"),
    ("capital of france", "it lives in china and eats bamboo"),
    ("bear", "a"),
]

ENCODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 0, "type_vocab_size": 2,
}  # fmt: skip
UNTYPED = {key: value for key, value in ENCODER.items() if key != "type_vocab_size"}
ROBERTA = ENCODER | {"max_position_embeddings": 34, "type_vocab_size": 1}
DECODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LABELS = {"id2label": {0: "bad", 1: "good", 2: "odd"}, "label2id": {"bad": 0, "good": 1, "odd": 2}}
ONE = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
TAGS = {"id2label": {0: "O", 1: "B-ANIMAL", 2: "B-PLACE"}, "label2id": {"O": 0, "B-ANIMAL": 1, "B-PLACE": 2}}

CASES = {
    "bert_reranker": (hf.BertForSequenceClassification, ENCODER | ONE),
    "bert_tokens": (hf.BertForTokenClassification, ENCODER | TAGS),
    "roberta": (hf.RobertaForSequenceClassification, ROBERTA | LABELS),
    "roberta_tokens": (hf.RobertaForTokenClassification, ROBERTA | TAGS),
    "distilbert": (hf.DistilBertForSequenceClassification, {
        "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32,
        "pad_token_id": 0, "problem_type": "multi_label_classification"} | LABELS),
    "electra": (hf.ElectraForSequenceClassification,
                ENCODER | ONE | {"embedding_size": 12, "problem_type": "regression"}),
    "albert": (hf.AlbertForSequenceClassification, ENCODER | LABELS | {"embedding_size": 12}),
    "mpnet": (hf.MPNetForSequenceClassification, UNTYPED | {"max_position_embeddings": 34, "pad_token_id": 1} | LABELS),
    "megatron_bert": (hf.MegatronBertForSequenceClassification, ENCODER | LABELS),
    "roformer": (hf.RoFormerForSequenceClassification, ENCODER | LABELS | {"embedding_size": 16}),
    "modernbert": (hf.ModernBertForSequenceClassification, UNTYPED | LABELS | {
        "classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
        "local_attention": 8}),
    "modernbert_tokens": (hf.ModernBertForTokenClassification, UNTYPED | TAGS | {
        "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 8}),
    "deberta_v3": (hf.DebertaV2ForSequenceClassification, UNTYPED | LABELS | {
        "relative_attention": True, "position_buckets": 4, "max_relative_positions": -1, "pos_att_type": "p2c|c2p",
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0,
        "pooler_hidden_size": 16, "pooler_dropout": 0, "pooler_hidden_act": "gelu"}),
    "qwen3": (hf.Qwen3ForSequenceClassification, DECODER | ONE),
    "llama": (hf.LlamaForSequenceClassification, DECODER | LABELS),
    "gemma": (hf.GemmaForSequenceClassification, DECODER | LABELS),
    "qwen3_tokens": (hf.Qwen3ForCausalLM, DECODER | {"classifier_from_token": ["no", "yes"]}),
}  # fmt: skip


def tokenizer(template: str) -> Tokenizer:
    """Returns a tokenizer of words with the template of a family."""
    # MPNet's padding is token 1, whatever its configuration says.
    special = [SPECIAL[1], SPECIAL[0], *SPECIAL[2:]] if template == "mpnet" else SPECIAL
    words = {word: at for at, word in enumerate(special + WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(SPECIAL)
    around = [(name, words[name]) for name in ("[CLS]", "[SEP]")]
    if template == "bert":
        pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
        made.post_processor = processors.TemplateProcessing("[CLS]:0 $A:0 [SEP]:0", pair, around)
    elif template == "embedder":
        # As Qwen3-Embedding's: the state of the token that ends a text is its vector.
        made.post_processor = processors.TemplateProcessing("$A:0 [SEP]:0", "$A:0 [SEP]:0 $B:1 [SEP]:1", around[1:])
    elif template in ("roberta", "mpnet"):
        made.post_processor = processors.RobertaProcessing(around[1], around[0], trim_offsets=False)
    return made


def template_of(name: str) -> str:
    if name.startswith("roberta"):
        return "roberta"
    if name == "mpnet":
        return name
    return "none" if name.startswith(("qwen", "llama", "gemma")) else "bert"


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int):
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:  # a table that the library computes
            continue
        noise = torch.randn(weight.shape, generator=random)
        is_norm = weight.dim() == 1 and not name.endswith("bias")
        weight.copy_(1 + 0.2 * noise if is_norm else 0.3 * noise)


def write(folder: Path, model: torch.nn.Module, made: Tokenizer):
    """Writes a model and its tokenizer."""
    model.save_pretrained(folder)
    for unused in ["generation_config.json"]:
        (folder / unused).unlink(missing_ok=True)
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        mask_token="[MASK]", model_max_length=32,
    )  # fmt: skip
    fast.save_pretrained(folder)


@torch.no_grad()
def answers(name: str, model: torch.nn.Module, made: Tokenizer) -> list[dict]:
    """Returns the logits of each text or pair."""
    found = []
    for texts in TEXTS:
        encoded = made.encode(*texts)
        inputs = {"input_ids": torch.tensor([encoded.ids])}
        if template_of(name) == "bert" and getattr(model.config, "type_vocab_size", 0) > 1:
            if "modernbert" not in name:
                inputs["token_type_ids"] = torch.tensor([encoded.type_ids])
        logits = model(**inputs).logits[0]
        if "classifier_from_token" in CASES[name][1]:
            logits = logits[-1][[made.token_to_id("no"), made.token_to_id("yes")]]
            logits = logits[1:] - logits[:1]
        entry = {"texts": texts, "ids": encoded.ids, "types": encoded.type_ids}
        found.append(entry | {"logits": [[round(x, 6) for x in row] for row in logits.reshape(-1, logits.shape[-1]).tolist()]})
    assert len({str(entry["logits"]) for entry in found}) == len(found), name
    return found


def make(name: str):
    kind, settings = CASES[name]
    model = kind(kind.config_class(**settings)).eval()
    randomise(model, 7)
    made = tokenizer(template_of(name))
    folder = FIXTURES / name
    write(folder, model, made)
    found = answers(name, kind.from_pretrained(folder).eval(), made)
    (folder / "answers.json").write_text(json.dumps({"texts": found}, separators=(",", ":")) + "\n")


def make_sentences(name: str):
    """Makes an embedding model with dense modules and prompts, and what sentence-transformers computes with it: an
    encoder, or a decoder like Qwen3-Embedding-8B, whose files name its class but lack its head and its prefix."""
    from safetensors.torch import save_file
    from sentence_transformers import SentenceTransformer

    folder = FIXTURES / name
    is_decoder = name == "qwen3_sentences"
    if is_decoder:
        model = hf.Qwen3Model(hf.Qwen3Config(**DECODER)).eval()
    else:
        model = hf.BertModel(hf.BertConfig(**ENCODER), add_pooling_layer=False).eval()
    randomise(model, 9)
    write(folder, model, tokenizer("embedder" if is_decoder else "bert"))
    if is_decoder:
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["Qwen3ForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    prefix = "sentence_transformers.models."
    names = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    paths = ["", *(f"{at}_{name}" for at, name in enumerate(names[1:], 1))]
    modules = [{"idx": at, "name": str(at), "path": path, "type": prefix + name}
               for at, (path, name) in enumerate(zip(paths, names))]  # fmt: skip
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "what is ", "document": "it is "}, "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": not is_decoder,
                                  "pooling_mode_lasttoken": is_decoder, "include_prompt": True},
        "2_Dense/config.json": {"in_features": 16, "out_features": 12, "bias": True,
                                "activation_function": "torch.nn.modules.activation.Tanh"},
        "3_Dense/config.json": {"in_features": 12, "out_features": 8, "bias": False,
                                "activation_function": "torch.nn.modules.linear.Identity"},
    }  # fmt: skip
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content, indent=2) + "\n")
    random = torch.Generator().manual_seed(3)
    draw = lambda *shape: 0.4 * torch.randn(shape, generator=random)  # noqa: E731
    save_file({"linear.weight": draw(12, 16), "linear.bias": draw(12)}, folder / "2_Dense/model.safetensors")
    save_file({"linear.weight": draw(8, 12)}, folder / "3_Dense/model.safetensors")
    reference = SentenceTransformer(str(folder), device="cpu")
    texts = [text for pair in TEXTS for text in pair]
    encode = lambda prompt: [[round(float(x), 6) for x in row]  # noqa: E731
                             for row in reference.encode(texts, prompt_name=prompt)]  # fmt: skip
    found = {"texts": texts, "plain": encode(None), "query": encode("query"), "document": encode("document")}
    if is_decoder:
        changed = reference[1].get_config_dict() | {"pooling_mode": "mean"}
        reference[1] = type(reference[1])(**changed)
        found["mean"] = encode(None)
        assert found["mean"] != found["plain"]
    (folder / "answers.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    wanted = sys.argv[1:] or [*CASES, "sentences", "qwen3_sentences"]
    for name in wanted:
        make_sentences(name) if name.endswith("sentences") else make(name)
        size = sum(file.stat().st_size for file in (FIXTURES / name).rglob("*") if file.is_file())
        print(f"{name:20} {size / 1000:6.1f} kB", flush=True)
