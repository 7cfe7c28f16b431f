"""The recorded outputs of a reference: greedy continuations of decoders, hidden states of encoders.

Every step is a new pass over all tokens, in float32 and without a cache; log-probabilities are float64.

Invariant: at every recorded step the two largest logits differ by at least MARGIN, so a correct engine has no ties to
break.
"""

import numpy as np
import torch

from .case import MARGIN, MASK, N_ANSWER, Case

MIN_DISTINCT = 6  # different tokens in an answer
INPUT_LENS = (1, 6, 19, 33)
SOURCE_LENS = (1, 7, 30)
LONG_PROMPT = 13  # decoder prompt tokens, in one of the answers
TRIES = 30


class Unclear(Exception):
    """Raised if the weights give an output that is not suitable for recording."""


def record_all(case: Case, model: torch.nn.Module, seed: int) -> dict:
    """Returns the part of answers.json for the case's kind of model. Raises `Unclear`."""
    random = np.random.default_rng([seed, *case.name.encode()])
    with torch.no_grad():
        if case.kind == "encoder":
            return {"inputs": [record_input(case, model, ids) for ids in inputs_of(case, random)]}
        return {"answers": [first_clear(case, model, lens, random) for lens in lengths_of(case)]}


def lengths_of(case: Case) -> list[tuple[int, int | None]]:
    """Returns the number of tokens of each prompt, and of the encoder input of an encoder-decoder."""
    if case.kind == "decoder":
        return [(n, None) for n in case.prompt_lens]
    return [(len(case.starts), n) for n in SOURCE_LENS] + [(LONG_PROMPT, SOURCE_LENS[1])]


def first_clear(case: Case, model: torch.nn.Module, lens: tuple[int, int | None], random) -> dict:
    """Returns the answer to the first prompt of these lengths that has a clear one."""
    prompt_len, source_len = lens
    for _ in range(TRIES):
        prompt = list(case.starts) + words(case, random, prompt_len - len(case.starts))
        source = None
        if source_len is not None:
            end = list(case.source_end) if source_len > len(case.source_end) else []
            source = random.choice(case.source_words, source_len - len(end)).tolist() + end
        try:
            return record_answer(case, model, prompt, source)
        except Unclear:
            if source is None and prompt_len == len(case.starts):
                break  # only one prompt has this length
    raise Unclear


def words(case: Case, random: np.random.Generator, n: int) -> list[int]:
    return random.choice(case.words, n).tolist()


def logprobs_of(case: Case, model: torch.nn.Module, ids: list[int], source: list[int] | None) -> torch.Tensor:
    """Returns (len(ids), vocab): row i is the distribution after ids[..=i]."""
    if source is None:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    else:
        out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]), use_cache=False)
        logits = out.logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def record_answer(case: Case, model: torch.nn.Module, prompt: list[int], source: list[int] | None) -> dict:
    """Returns one entry of `answers`. End tokens are treated like any other token."""
    reserved = len(prompt) + N_ANSWER
    side = case.reserve(model, reserved) if case.reserve else None
    answer = greedy(case, model, prompt, source)
    ids = prompt + answer
    table = logprobs_of(case, model, ids, source)
    chosen = table[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    top = table[len(prompt) - 1 : -1].topk(5, dim=1)
    return {
        **({} if source is None else {"source": source}),
        "prompt": prompt,
        **({} if side is None else {"reserved": reserved, "side": side}),
        "prompt_logprobs": rounded(chosen[: len(prompt) - 1]),
        "ignore_eos": True,
        "answer": answer,
        "finish": "length",
        "answer_logprobs": rounded(chosen[len(prompt) - 1 :]),
        "top5_ids": top.indices.tolist(),
        "top5_logprobs": [rounded(row) for row in top.values],
        "margin": round(float((top.values[:, 0] - top.values[:, 1]).min()), 6),
    }


def greedy(case: Case, model: torch.nn.Module, prompt: list[int], source: list[int] | None) -> list[int]:
    """Returns the greedy continuation. It contains no padding, which some families do not count as a position."""
    ids = list(prompt)
    while len(ids) < len(prompt) + N_ANSWER:
        best = logprobs_of(case, model, ids, source)[-1].topk(2)
        if best.values[0] - best.values[1] < 2 * MARGIN:
            raise Unclear
        ids.append(int(best.indices[0]))
    answer = ids[len(prompt) :]
    if len(set(answer)) < MIN_DISTINCT or case.config.get("pad_token_id") in answer:
        raise Unclear
    return answer


def inputs_of(case: Case, random: np.random.Generator) -> list[list[int]]:
    """Returns texts of several lengths, and the longer ones again with some words masked."""
    start, end = list(case.starts), list(case.source_end)
    texts = []
    for n in INPUT_LENS:
        texts.append((start + words(case, random, max(n - len(start) - len(end), 0)) + end)[:n])
    return texts + [masked(text, random, mask_of(case)) for text in texts if len(text) > 2 and mask_of(case)]


def mask_of(case: Case) -> int | None:
    return None if case.pool else case.config.get("mask_token_id", MASK)


def masked(text: list[int], random: np.random.Generator, mask: int) -> list[int]:
    """Returns the text with an eighth of its words, but at least one, masked."""
    text = list(text)
    for at in random.choice(range(1, len(text) - 1), max(1, len(text) // 8), replace=False):
        text[at] = mask
    return text


def record_input(case: Case, model: torch.nn.Module, ids: list[int]) -> dict:
    """Returns one entry of `inputs`: the last hidden states, and the candidates for each mask."""
    hidden, logits = hidden_and_logits(case, model, ids)
    entry = {"ids": ids, "hidden": [rounded(row) for row in hidden]}
    if case.pool:
        mean = hidden.double().mean(dim=0)
        return entry | {"pooled": rounded(mean / mean.norm())}
    places = [at for at, token in enumerate(ids) if token == mask_of(case)]
    return entry | {"masks": [record_mask(logits[at], at) for at in places]}


def hidden_and_logits(case: Case, model: torch.nn.Module, ids: list[int]) -> tuple:
    """Returns (len(ids), hidden), and (len(ids), vocab) if there is a mask head."""
    tokens = torch.tensor([ids])
    hidden = model.base_model(input_ids=tokens)[0][0]
    return hidden, None if case.pool else model(input_ids=tokens).logits[0]


def record_mask(logits: torch.Tensor, at: int) -> dict:
    top = torch.log_softmax(logits.double(), dim=-1).topk(5)
    if top.values[0] - top.values[1] < 2 * MARGIN:
        raise Unclear
    return {"at": at, "top5_ids": top.indices.tolist(), "top5_logprobs": rounded(top.values)}


def fingerprint(case: Case, model: torch.nn.Module, recorded: dict) -> torch.Tensor:
    """Returns a model's values for all numbers that were recorded from another one."""
    if case.kind == "encoder":
        return torch.cat([fingerprint_of_input(case, model, entry) for entry in recorded["inputs"]])
    return torch.cat([fingerprint_of_answer(case, model, entry) for entry in recorded["answers"]])


def fingerprint_of_answer(case: Case, model: torch.nn.Module, entry: dict) -> torch.Tensor:
    if case.reserve:
        case.reserve(model, entry["reserved"])
    ids = entry["prompt"] + entry["answer"]
    table = logprobs_of(case, model, ids, entry.get("source"))[:-1]
    chosen = table.gather(1, torch.tensor(ids[1:])[:, None])
    top = table[len(entry["prompt"]) - 1 :].gather(1, torch.tensor(entry["top5_ids"]))
    return torch.cat([chosen.flatten(), top.flatten()])


def fingerprint_of_input(case: Case, model: torch.nn.Module, entry: dict) -> torch.Tensor:
    hidden, logits = hidden_and_logits(case, model, entry["ids"])
    parts = [hidden.flatten()]
    for mask in entry.get("masks", []):
        parts.append(torch.log_softmax(logits[mask["at"]].double(), dim=-1)[mask["top5_ids"]])
    return torch.cat(parts)


def rounded(values: torch.Tensor) -> list[float]:
    return [round(v, 6) for v in values.tolist()]
