"""Makes tests/fixtures/perplexity: a text that was not used to train the demo model, and its likelihood computed by
transformers.

    python tests/oracle/make_perplexity.py

`held_out.txt` consists of documents of the demo corpus from a seed that training never uses, separated by the text of
the begin token. `answers.json` is described in README.md: each chunk's negative log-likelihood, computed by the loop
in transformers' page "Perplexity of fixed-length models", and the divergence of the model from the one whose matrices
are quantized to Q4_0. Everything is computed in float32 from the weights as stored; logarithms and sums are float64.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from transformers import AutoTokenizer, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIXTURES = HERE.parent / "fixtures" / "perplexity"
DEMO = ROOT / "assets" / "demo"
CHARACTERS = 18_500
CUTS = [(512, 512), (256, 64), (100, 99)]

sys.path.insert(0, str(ROOT / "tools" / "demo_model"))
import corpus  # noqa: E402
from layout import BEGIN  # noqa: E402


def held_out() -> str:
    """Returns as many whole documents as fit."""
    stream = corpus.documents(corpus.HELD_OUT)
    text = next(stream)
    while len(text) + len(following := BEGIN + next(stream)) <= CHARACTERS:
        text += following
    return text


def logprobs(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    """Returns the log-probabilities of all tokens after each of `ids`, (ids, vocabulary)."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].to(torch.float64)
    return torch.log_softmax(logits, dim=-1).numpy()


def windows(count: int, context: int, stride: int):
    """Yields (begin, end, first scored token) of each chunk, as on the page; chunks without a scored token are
    skipped."""
    seen = 0
    for begin in range(0, count, stride):
        end = min(begin + context, count)
        first = max(seen, begin + 1)
        if first < end:
            yield begin, end, first
        seen = end
        if end == count:
            break


def chunks(model: LlamaForCausalLM, ids: list[int], context: int, stride: int) -> list[dict]:
    """Returns the sum of the negative log-likelihoods of each chunk's scored tokens."""
    made = []
    for begin, end, first in windows(len(ids), context, stride):
        rows = logprobs(model, ids[begin:end])
        nll = -sum(rows[at - begin - 1, ids[at]] for at in range(first, end))
        made.append({"begin": begin, "end": end, "scored": end - first, "nll": float(nll)})
    return made


def in_blocks(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Returns the model with every matrix quantized to Q4_0 and dequantized."""
    coded = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for weight in coded.parameters():
            if weight.ndim == 2:
                numbers = dequantize(quantize(weight.numpy(), Type.Q4_0), Type.Q4_0)
                weight.copy_(torch.from_numpy(numbers.reshape(weight.shape)))
    assert coded.lm_head.weight is coded.model.embed_tokens.weight
    return coded


def difference(model: LlamaForCausalLM, other: LlamaForCausalLM, ids: list[int], context: int) -> dict:
    """Returns the difference of `other` from the model, over consecutive chunks."""
    kl, own, same = [], [], []
    for begin, end, first in windows(len(ids), context, context):
        p, q = (logprobs(each, ids[begin:end])[: end - begin - 1] for each in (model, other))
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        targets = ids[begin + 1 : end]
        own += [(p[at, token], q[at, token]) for at, token in enumerate(targets)]
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    ordered = sorted(kl)
    at_rank = lambda share: ordered[max(int(np.ceil(share * len(kl))), 1) - 1]
    true, coded = np.array(own).T
    return {
        "scored": len(kl),
        "nll": float(-coded.mean()),
        "kl": float(np.mean(kl)),
        "kl_error": float(np.std(kl, ddof=1) / np.sqrt(len(kl))),
        "kl_median": at_rank(0.5),
        "kl_p99": at_rank(0.99),
        "kl_max": at_rank(1.0),
        "same_choice": float(np.mean(same)),
        "logprob": float(np.abs(true - coded).mean()),
    }


def main():
    FIXTURES.mkdir(parents=True, exist_ok=True)
    text = held_out()
    (FIXTURES / "held_out.txt").write_text(text)
    ids = AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")
    answers = {
        "tokens": len(ids),
        "first": ids[:8],
        "cuts": [
            {"context": context, "stride": stride, "chunks": chunks(model, ids, context, stride)}
            for context, stride in CUTS
        ],
        "q4_0": difference(model, in_blocks(model), ids, 512),
    }
    (FIXTURES / "answers.json").write_text(json.dumps(answers, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
