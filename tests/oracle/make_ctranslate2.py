"""Makes the models of CTranslate2 in tests/fixtures/families, from cases of `families/translators.py`.

    python tests/oracle/make_ctranslate2.py [NAME ...]

CTranslate2's own converter writes them, from a random model of transformers. answers.json (described in README.md)
has the outputs of that model with the numbers of the file: those of `int8` and `int16` as they are loaded by default.

Invariant: CTranslate2 itself gives every recorded log-probability to within TOLERANCE, and without quantization the
same greedy tokens.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import transformers as converters
from families import answers, reference, words
from families.case import Case
from families.translators import CASES
from make_families import write_json

TOLERANCE = {None: 1e-3, "float16": 1e-3, "int16": 2e-2, "int8": 6e-2}
NEVER = -60000.0  # the bias of the token that the decoder starts with, if the converter removes it


@dataclass(frozen=True)
class Conversion:
    """A model to convert: the name of its case, and the number format of the matrices."""

    of: str
    quantization: str | None

    @property
    def name(self) -> str:
        return f"ctranslate2_{self.of}"

    @property
    def case(self) -> Case:
        return replace(next(case for case in CASES if case.name == self.of), name=self.name, kind="encoder-decoder")


CONVERSIONS = [
    Conversion("m2m100", None),
    Conversion("bart", "int16"),
    Conversion("marian", "int8"),
    Conversion("marian_two_vocabularies", None),
    Conversion("t5", "float16"),
]


class Tokens:
    """Stands for a tokenizer of transformers."""

    bos_token, eos_token, unk_token, pad_token = "<s>", "</s>", "<unk>", "<pad>"


def make(conversion: Conversion):
    case = conversion.case
    for seed in range(500):
        model = reference.randomise(case, seed)
        is_marian = conversion.of.startswith("marian")
        if is_marian:
            without_start(model)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / case.name
            try:
                recorded = convert_and_record(conversion, case, model, folder, seed)
            except answers.Unclear:
                continue
            eos = [case.config["eos_token_id"]]
            head = {"fixture": case.name, "kind": case.kind, "reference": case.model.__name__}
            note = f"converted by CTranslate2 {ctranslate2.__version__}, {conversion.quantization or 'float32'}"
            write_json(
                folder / "answers.json", head | {"note": note, "seed": seed, "eos_token_ids": eos} | recorded
            )
            shutil.rmtree(case.folder, ignore_errors=True)
            shutil.move(folder, case.folder)
        print(case.name, "seed", seed, sum(file.stat().st_size for file in case.folder.iterdir()), "bytes")
        return
    raise SystemExit(f"{case.name}: no seed gives clear answers")


@torch.no_grad()
def without_start(model: torch.nn.Module):
    """Makes the start token one that the converter can replace by a zero embedding."""
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_tokens.weight[-1] = 0.0
    model.lm_head.weight[-1] = 0.0
    model.final_logits_bias[0, -1] = NEVER


@torch.no_grad()
def convert_and_record(conversion: Conversion, case: Case, model, folder: Path, seed: int) -> dict:
    specification = specify(conversion, case, model)
    specification.validate()
    specification.optimize(quantization=conversion.quantization or "float32")
    folder.mkdir()
    specification.save(str(folder))
    load(conversion, model, specification.variables())
    recorded = answers.record_all(case, model, seed)
    check(conversion, case, folder, recorded)
    return recorded


def specify(conversion: Conversion, case: Case, model):
    loader = converters._MODEL_LOADERS[type(model.config).__name__]
    is_marian = conversion.of.startswith("marian")
    if is_marian:  # the converter would lose the sign of the bias
        bias = model.final_logits_bias.clone()
        model.final_logits_bias[0, -1] = 0.0
    if conversion.of == "bart":
        model.config.normalize_before, model.config.normalize_embedding = False, True
    specification = loader.get_model_spec(model)
    decoder = specification.decoder
    if is_marian:
        model.final_logits_bias.copy_(bias)
        rows = model.model.decoder.embed_tokens.weight.shape[0] - 1
        for part in (decoder.embeddings, decoder.projection):  # of another size than the source's
            part.weight = part.weight[:rows]
        decoder.projection.bias = decoder.projection.bias[:rows]
    vocabulary = [*words.SPECIALS, *words.WORDS]
    source, target = specification.encoder.embeddings[0].weight.shape[0], decoder.embeddings.weight.shape[0]
    named = lambda n: (vocabulary + [f"madeupword{i}" for i in range(n)])[:n]
    specification.register_source_vocabulary(named(source))
    specification.register_target_vocabulary(named(target))
    tokens, config = named(max(source, target)), specification.config
    config.bos_token, config.unk_token = tokens[case.config.get("bos_token_id", 0)], "<unk>"
    config.eos_token = tokens[case.config["eos_token_id"]]
    config.decoder_start_token = config.eos_token if is_marian else tokens[case.config["decoder_start_token_id"]]
    config.layer_norm_epsilon = case.config.get("layer_norm_epsilon")
    return specification


def load(conversion: Conversion, model, variables: dict):
    """Gives the model the numbers of the file."""
    numbers = {name: as_loaded(name, variables) for name, value in variables.items() if not isinstance(value, str)}
    numbers |= {alias: numbers[name] for alias, name in variables.items() if isinstance(name, str)}
    if conversion.of == "t5":
        return  # float16 has the numbers of the model
    for stack, module in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        first = "embeddings_0" if stack == "encoder" else "embeddings"
        embedding = numbers[f"{stack}/{first}/weight"]
        module.embed_tokens.weight[: len(embedding)] = embedding
        for i, layer in enumerate(module.layers):
            name = f"{stack}/layer_{i}"
            own = layer.self_attn
            split(numbers, f"{name}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            split(numbers, f"{name}/self_attention/linear_1", own.out_proj)
            split(numbers, f"{name}/ffn/linear_0", layer.fc1)
            split(numbers, f"{name}/ffn/linear_1", layer.fc2)
            if stack == "decoder":
                cross = layer.encoder_attn
                split(numbers, f"{name}/attention/linear_0", cross.q_proj)
                split(numbers, f"{name}/attention/linear_1", cross.k_proj, cross.v_proj)
                split(numbers, f"{name}/attention/linear_2", cross.out_proj)
    head = numbers["decoder/projection/weight"]
    model.lm_head.weight[: len(head)] = head


def split(numbers: dict, name: str, *modules):
    """Gives the modules their rows of a matrix."""
    rows = numbers[f"{name}/weight"]
    for module in modules:
        count = module.weight.shape[0]
        module.weight.copy_(rows[:count])
        rows = rows[count:]
    assert len(rows) == 0, name


def as_loaded(name: str, variables: dict) -> torch.Tensor:
    """Returns the numbers of a variable as they are loaded by default."""
    stored = variables[name].numpy()
    if stored.dtype not in (np.int8, np.int16) or f"{name}_scale" not in variables:
        return torch.from_numpy(np.array(stored, dtype=np.float32))
    factor = np.float32(1.0) / variables[f"{name}_scale"].numpy()
    if stored.dtype == np.int8:
        factor = factor[:, None]
        if stored.shape[1] % 32 == 0:  # Q8_0
            return torch.from_numpy(stored.astype(np.float32) * factor.astype(np.float16).astype(np.float32))
    return torch.from_numpy((stored.astype(np.float32) * factor).astype(np.float16).astype(np.float32))


def check(conversion: Conversion, case: Case, folder: Path, recorded: dict):
    """Compares the recorded outputs with those of CTranslate2."""
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    vocabulary = [*words.SPECIALS, *words.WORDS] + [f"madeupword{i}" for i in range(99)]
    name = lambda ids: [vocabulary[i] for i in ids]
    is_marian, tolerance = conversion.of.startswith("marian"), TOLERANCE[conversion.quantization]
    for entry in recorded["answers"]:
        source, prefix = entry["source"], entry["prompt"][1:]
        removed = [case.config["decoder_start_token_id"], case.config["vocab_size"] - 1] if is_marian else []
        if set(removed) & {*source, *prefix, *entry["answer"]}:
            raise answers.Unclear
        ids = prefix + entry["answer"]
        scored = translator.score_batch([name(source)], [name(ids)])[0]
        expected = entry["prompt_logprobs"] + entry["answer_logprobs"]
        found = scored.log_probs[: len(expected)]
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        assert worst <= tolerance, (case.name, worst)
        if conversion.quantization in (None, "float16"):
            end = next(word for word in vocabulary[:90] if word not in name(ids))
            translated = translator.translate_batch(
                [name(source)], [name(prefix)], beam_size=1, max_decoding_length=len(ids), end_token=end
            )
            assert translated[0].hypotheses[0] == name(ids), case.name


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for conversion in CONVERSIONS:
        if not wanted or conversion.name in wanted:
            make(conversion)
