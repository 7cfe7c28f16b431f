"""Makes tests/fixtures: tiny random Llama checkpoints and the outputs of Hugging Face transformers for them.

    python tests/oracle/make_fixtures.py [NAME ...]

Each folder looks like a model folder of the hub, plus answers.json (described in README.md). The reference is
computed in float32 from the weights as stored, after reading the written folder. Transformers 5 writes the RoPE
settings as `rope_parameters`; for folders with the older keys, this script rewrites config.json, and reads it back
too.

Invariant: at every recorded step the two largest logits differ by at least MARGIN, so a correct engine has no ties to
break.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tools"))
import byte_bpe  # noqa: E402
import llama2c  # noqa: E402

FIXTURES = HERE.parent / "fixtures"
MARGIN = 0.01
N_ANSWER = 24
PROMPT_LENS = (1, 5, 37, 70)
MAX_POSITIONS = 128
MIN_DISTINCT = 8  # different tokens in a full-length answer
SPECIALS = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2
TEXTS = [
    "the rain in the main stem",
    " other  things,\n\tthen 42!",
    "naïve café — 水 🙂",
    "<s>in</s> there",
    "",
]

SPACE = byte_bpe.SPACE
MERGES = [tuple(pair.replace("_", SPACE).split()) for pair in (
    "t h;h e;i n;th e;_ the;a n;e r;r e;o n;_ a;_ t;e n;_ in;n d;a t;i t;o u;an d;_ s;o r;in g;_ and;s t;e s;a r;_ o;"
    "l l;e d;_ w;m e;_ b;i s;_ th;s e;l e;_ m;_ f;o w;_ c;_ h;v e;_ p"
).split(";")]  # fmt: skip

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Fixture:
    """A checkpoint to make. `rope` contains the RoPE settings besides theta; `spelling` selects the keys of
    config.json."""

    name: str
    hidden: int = 32
    ffn: int = 44
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int | None = None
    vocab: int = 263
    theta: float = 10000.0
    rope: dict | None = None
    spelling: str = "scaling"  # "first": Llama 1, "scaling": Llama 2 and 3, "current"
    eps: float = 1e-5
    tied: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float32
    shard_size: str = "5GB"
    std: float = 0.2
    eos: tuple[int, ...] = (EOS,)
    stops: bool = False  # some answer must end with the last token of `eos`

    def config(self) -> LlamaConfig:
        rope = {"rope_type": "default", "rope_theta": self.theta, **(self.rope or {})}
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=self.eps,
            rope_parameters=rope,
            attention_bias=self.biased,
            mlp_bias=self.biased,
            tie_word_embeddings=self.tied,
            initializer_range=self.std,
            bos_token_id=BOS,
            eos_token_id=self.eos[0] if len(self.eos) == 1 else list(self.eos),
        )


HUB_FIXTURES = [
    Fixture("mha", ffn=38, vocab=269, spelling="first", eps=1e-6),
    Fixture("gqa", hidden=48, ffn=36, heads=8, kv_heads=2),
    Fixture("mqa", heads=2, kv_heads=1, vocab=259, stops=True),
    Fixture("tied", tied=True, layers=3, ffn=36, kv_heads=2, vocab=301),
    Fixture("biased", biased=True, kv_heads=2, vocab=265),
    Fixture("odd_head_dim", hidden=36, kv_heads=2, head_dim=10, layers=3, ffn=25, vocab=260),
    Fixture("rope_linear", rope={"rope_type": "linear", "factor": 4.0}, theta=1000.0, kv_heads=2, vocab=261),
    # With head sizes of 16 and more, there are frequencies in each of the three bands of the llama3 rule.
    Fixture("rope_llama3", rope={"rope_type": "llama3", **LLAMA3}, heads=2, kv_heads=1, stops=True, eos=(EOS, 260)),
    Fixture("rope_parameters", rope={"rope_type": "llama3", **LLAMA3}, theta=50000.0, heads=2, kv_heads=1,
            head_dim=32, ffn=36, spelling="current"),
    Fixture("sharded", shard_size="50KB", kv_heads=2, ffn=36, vocab=259, spelling="current"),
    # Every inner dimension is a multiple of 32, so the matrices can be stored in any block format.
    Fixture("f16", dtype=torch.float16, hidden=64, ffn=64, kv_heads=2, vocab=288, std=0.15, spelling="current"),
    Fixture("bf16", dtype=torch.bfloat16, kv_heads=2, vocab=277, spelling="current"),
]  # fmt: skip

SMALL = {"hidden": 16, "ffn": 40, "heads": 4, "kv_heads": 2, "vocab": 301, "std": 0.3}
# A row of `down` is two and a half groups. Rows of q and k are whole groups, so reordering them changes no group.
LLAMA2C_GROUP = 16
LLAMA2C_FIXTURES = {"": Fixture("llama2c", **SMALL), "_shared": Fixture("llama2c", **SMALL, tied=True)}


def make_model(fixture: Fixture, seed: int) -> LlamaForCausalLM:
    """Creates random weights in float32, already rounded to the fixture's data type. Norms and biases are random
    too."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(fixture.config(), attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1.0 + 0.2 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
        model.lm_head.weight.mul_(2.0)  # separates the logits
        if fixture.stops:
            model.lm_head.weight[fixture.eos[-1]].mul_(2.5)
        for weight in model.parameters():
            weight.copy_(weight.to(fixture.dtype).float())
    return model.eval()


def make_prompts(fixture: Fixture) -> list[list[int]]:
    """Returns prompts that begin with BOS and have no further special tokens. They are the same for every seed."""
    random = np.random.default_rng([fixture.vocab, fixture.hidden])
    return [[BOS, *random.integers(len(SPECIALS), fixture.vocab, n - 1).tolist()] for n in PROMPT_LENS]


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Returns (len(ids), vocab): row i is the distribution after ids[..=i]. Logits are float32, the softmax is
    float64."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def greedy(model: LlamaForCausalLM, prompt: list[int], eos: tuple[int, ...]) -> list[int]:
    """Returns the greedy continuation, with a new pass over all tokens at each step; it ends after a token of `eos`."""
    ids = list(prompt)
    while len(ids) < len(prompt) + N_ANSWER:
        ids.append(int(logprobs_of(model, ids)[-1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


def rounded(values: torch.Tensor) -> list[float]:
    return [round(v, 6) for v in values.tolist()]


def record(model: LlamaForCausalLM, prompt: list[int], eos: tuple[int, ...]) -> dict:
    """Returns one entry of `answers` in answers.json."""
    answer = greedy(model, prompt, eos)
    ids = prompt + answer
    table = logprobs_of(model, ids)
    chosen = table[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    top = table[len(prompt) - 1 : -1].topk(5, dim=1)
    return {
        "prompt": prompt,
        "prompt_logprobs": rounded(chosen[: len(prompt) - 1]),
        "ignore_eos": not eos,
        "answer": answer,
        "finish": "stop" if answer[-1] in eos else "length",
        "answer_logprobs": rounded(chosen[len(prompt) - 1 :]),
        "top5_ids": top.indices.tolist(),
        "top5_logprobs": [rounded(row) for row in top.values],
        "margin": round(float((top.values[:, 0] - top.values[:, 1]).min()), 6),
    }


def record_all(model: LlamaForCausalLM, fixture: Fixture) -> list[dict]:
    """Returns the answer to every prompt, and again with the end token ignored if it was reached."""
    entries = [record(model, prompt, fixture.eos) for prompt in make_prompts(fixture)]
    entries += [record(model, e["prompt"], ()) for e in entries if e["finish"] == "stop"]
    return entries


def is_good(entries: list[dict], fixture: Fixture) -> bool:
    """Returns whether the answers are clear and varied enough to be recorded."""
    full = [e for e in entries if e["finish"] == "length"]
    stopped = [e for e in entries if e["finish"] == "stop"]
    lively = all(len(set(e["answer"])) >= MIN_DISTINCT for e in full)
    ends = not stopped
    if fixture.stops:
        late = [e for e in stopped if len(e["answer"]) >= 5 and e["answer"][-1] == fixture.eos[-1]]
        ends = late and len(full) > len(stopped)
    return lively and bool(ends) and all(e["margin"] >= 2 * MARGIN for e in entries)


def search(fixture: Fixture) -> tuple[int, LlamaForCausalLM, list[dict]]:
    """Returns the first seed whose answers are good."""
    for seed in range(5000):
        model = make_model(fixture, seed)
        if not is_lively(model, fixture):
            continue
        entries = record_all(model, fixture)
        if is_good(entries, fixture):
            return seed, model, entries
    raise SystemExit(f"{fixture.name}: no seed gives clear answers")


def is_lively(model: LlamaForCausalLM, fixture: Fixture) -> bool:
    """A cheap first check: whether the answer to the shortest prompt is not a repetition of one phrase."""
    return len(set(record(model, [BOS], ())["answer"])) >= MIN_DISTINCT


def check_generate(model: LlamaForCausalLM, entries: list[dict]):
    """Checks that the library's own cached generation gives the same tokens, with the margin at every step."""
    for entry in entries:
        ids = torch.tensor([entry["prompt"]])
        # -1 is not a token id, so generation runs to its full length.
        end = {"eos_token_id": -1} if entry["ignore_eos"] else {}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=N_ANSWER,
            pad_token_id=0,
            **end,
        )
        assert out[0, ids.shape[1] :].tolist() == entry["answer"]
        assert entry["margin"] >= MARGIN


def write_json(path: Path, content, indent: int | None = None):
    separators = (",", ":") if indent is None else None
    path.write_text(
        json.dumps(content, indent=indent, separators=separators, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def respell(config: dict, fixture: Fixture) -> dict:
    """Rewrites config.json with the keys of older releases: `scaling` like Llama 2 and 3, `first` like Llama 1."""
    config = {
        k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "transformers_version")
    }
    config["torch_dtype"] = str(fixture.dtype).removeprefix("torch.")
    if fixture.head_dim is None:
        del config["head_dim"]
    if fixture.spelling == "first":
        for key in ("num_key_value_heads", "attention_bias", "mlp_bias"):
            del config[key]
        return config
    config["rope_theta"] = fixture.theta
    config["rope_scaling"] = fixture.rope
    if fixture.rope and fixture.rope["rope_type"] == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": fixture.rope["factor"]}
    return config


def save(fixture: Fixture, model: LlamaForCausalLM, folder: Path):
    """Writes the model folder as the library saves it, except for the keys of config.json."""
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config.do_sample = False
    model.to(fixture.dtype).save_pretrained(folder, max_shard_size=fixture.shard_size)
    if fixture.spelling != "current":
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", respell(config, fixture), indent=2)
    vocabulary = byte_bpe.build(fixture.vocab, SPECIALS, MERGES)
    write_json(folder / "tokenizer.json", vocabulary.tokenizer_json(SPECIALS[BOS]))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config, indent=2)


def encodings(folder: Path) -> list[dict]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [{"text": text, "ids": tokenizer.encode(text).ids} for text in TEXTS]


def answers(fixture: Fixture, seed: int, entries: list[dict]) -> dict:
    return {"fixture": fixture.name, "seed": seed, "eos_token_ids": list(fixture.eos), "answers": entries}


def make_hub_fixture(fixture: Fixture):
    seed, model, searched = search(fixture)
    folder = FIXTURES / fixture.name
    save(fixture, model, folder)
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    entries = record_all(stored, fixture)
    assert entries == searched, f"{fixture.name}: the folder does not hold the model that was searched for"
    check_generate(stored, entries)
    write_json(folder / "answers.json", answers(fixture, seed, entries) | {"encodings": encodings(folder)})
    report(fixture.name, seed, folder, entries)


def make_llama2c():
    """Writes every version of the .bin format, with a separate and with a shared classifier, and the answers for
    each."""
    folder = FIXTURES / "llama2c"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for suffix, fixture in LLAMA2C_FIXTURES.items():
        seed, model, entries = search(fixture)
        check_generate(model, entries)
        llama2c.write_v0(folder / f"v0{suffix}.bin", model)
        llama2c.write_v1(folder / f"v1{suffix}.bin", model)
        write_json(folder / f"answers{suffix}.json", answers(fixture, seed, entries))
        report(f"llama2c{suffix}", seed, folder, entries)
        make_llama2c_v2(folder, suffix, fixture, seed, model)
    llama2c.write_tokenizer(folder / "tokenizer.bin", SMALL["vocab"])


def make_llama2c_v2(folder: Path, suffix: str, fixture: Fixture, seed: int, model: LlamaForCausalLM):
    """Writes the same model in groups, and the answers for the dequantized weights."""
    llama2c.write_v2(folder / f"v2{suffix}.bin", model, LLAMA2C_GROUP)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.from_numpy(llama2c.held(weight.numpy(), LLAMA2C_GROUP)))
    entries = record_all(model, fixture)
    assert all(entry["margin"] >= MARGIN for entry in entries), [entry["margin"] for entry in entries]
    check_generate(model, entries)
    write_json(folder / f"answers_v2{suffix}.json", answers(fixture, seed, entries))
    report(f"llama2c v2{suffix}", seed, folder, entries)


def report(name: str, seed: int, folder: Path, entries: list[dict]):
    size = sum(file.stat().st_size for file in folder.iterdir())
    ends = " ".join(f"{len(e['prompt'])}+{len(e['answer'])}{'!' * (e['finish'] == 'stop')}" for e in entries)
    print(
        f"{name:16} seed {seed:4}  {size / 1000:6.1f} kB  margin {min(e['margin'] for e in entries):.4f}  {ends}",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = sys.argv[1:]
    for fixture in HUB_FIXTURES:
        if not wanted or fixture.name in wanted:
            make_hub_fixture(fixture)
    if not wanted or "llama2c" in wanted:
        make_llama2c()


if __name__ == "__main__":
    main()
