"""Writes tests/fixtures/beams: the beam search of Hugging Face transformers on models of tests/fixtures.

    python tests/oracle/make_beams.py [NAME ...]

A file per model, described in README.md. The models have random weights, so end tokens are chosen among the tokens
that beams reach. The reference is the library's `generate` in float32; every score is computed again in float64 from
one pass over the whole sequence.

Invariant: every comparison on which a recorded result depends (which candidates may end, which continue, which ended
ones are kept, when the search stops, the order of the results) is decided by at least MARGIN, so a correct engine has
no ties to break.
"""

import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig
from transformers.utils import logging

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
OUT = FIXTURES / "beams"
DECODERS = ["mha", "gqa", "tied", "families/gpt2", "families/qwen3", "families/bloom"]
ENCODER_DECODERS = {  # the decoder's prompt; a second token is forced by the library
    "families/t5": [0],
    "families/bart": [2, 0],
    "families/m2m100": [2, 6],
}
MARGIN = 3e-4  # the scores of an engine differ by 1e-5
TOLERANCE = 1e-4  # of scores, against float64
FIRST_WORD = 8
BOS = 1
TRIES = 300

WIDTHS = (2, 4, 8)
PENALTIES = (0.0, 1.0, 2.0, -0.5)
STOPPING = (False, True, "never")
ALL = list(itertools.product(WIDTHS, PENALTIES, STOPPING))
# Each width with each way of stopping, and every penalty at least twice.
SOME = [
    (width, PENALTIES[(3 * i + j) % 4], stopping)
    for i, width in enumerate(WIDTHS)
    for j, stopping in enumerate(STOPPING)
]


class Unclear(Exception):
    """Raised if a prompt gives a result that is not suitable for recording."""


@dataclass(frozen=True)
class Search:
    """The input of a search, apart from the settings of `run`. `forced` is the number of last prompt tokens that
    the library generates itself, by its `forced_bos_token_id`; they count in `max_length`."""

    prompt: list[int]
    source: list[int] | None
    forced: int
    end_tokens: list[int]
    max_tokens: int
    min_tokens: int


class Watched:
    """Raises `Unclear` where a decision of a model's beam search is close. Checks the arguments of the methods of
    `GenerationMixin` that decide."""

    def __init__(self, model: torch.nn.Module):
        self.skips_padding = model.config.model_type == "m2m_100"
        self.pad = model.config.pad_token_id
        self.cur_len = 0
        self.watch(model, "_get_top_k_continuations", self.note_length)
        self.watch(model, "_get_running_beams_for_next_iteration", self.check_candidates)
        self.watch(model, "_update_finished_beams", self.check_finished)
        self.watch(model, "_check_early_stop_heuristic", self.check_stop)

    @staticmethod
    def watch(model: torch.nn.Module, name: str, check):
        original = getattr(model, name)

        def checked(**arguments):
            check(**arguments)
            return original(**arguments)

        setattr(model, name, checked)

    def note_length(self, cur_len, **_):
        self.cur_len = cur_len

    def check_candidates(
        self, topk_log_probs, topk_running_sequences, next_token_hits_stopping_criteria, num_beams, **_
    ):
        """Checks which candidates may end, being among the best `num_beams` of all, and which continue, being among
        the best `num_beams` of those that do not end."""
        values, ends = topk_log_probs[0], next_token_hits_stopping_criteria[0]
        clear(values[:num_beams][ends[:num_beams]] - values[num_beams])
        clear(values[num_beams - 1] - values[num_beams:][ends[num_beams:]])
        if ends.all():
            return  # the maximum length
        running = values[~ends]
        clear(running[num_beams - 1] - (running[num_beams] if len(running) > num_beams else values[-1]))
        # A family that does not count padding as a position is not expected to generate it.
        tokens = topk_running_sequences[0, ~ends, self.cur_len][:num_beams]
        if self.skips_padding and (tokens == self.pad).any():
            raise Unclear

    def check_finished(
        self,
        beam_scores,
        topk_log_probs,
        next_token_hits_stopping_criteria,
        top_num_beam_mask,
        num_beams,
        cur_len,
        decoder_prompt_len,
        length_penalty,
        **_,
    ):
        """Checks which ended sequences are kept."""
        ended = next_token_hits_stopping_criteria[0] & top_num_beam_mask
        new = topk_log_probs[0][ended] / (cur_len + 1 - decoder_prompt_len) ** length_penalty
        merged = torch.cat((beam_scores[0], new))
        merged = merged[merged > -1e8].sort(descending=True).values
        if len(merged) > num_beams:
            clear(merged[num_beams - 1] - merged[num_beams])

    def check_stop(
        self,
        running_beam_scores,
        beam_scores,
        is_sent_finished,
        cur_len,
        max_length,
        decoder_prompt_len,
        early_stopping,
        length_penalty,
        **_,
    ):
        """Checks the comparison that stops the search, unless it stops anyway."""
        if not is_sent_finished.all() or cur_len == max_length or early_stopping is True:
            return
        longest = early_stopping == "never" and length_penalty > 0.0
        length = (max_length if longest else cur_len) - decoder_prompt_len
        clear((running_beam_scores[0, 0] / length**length_penalty - beam_scores[0].min()).abs())


def clear(gaps: torch.Tensor):
    if (gaps < MARGIN).any():
        raise Unclear


def load(name: str) -> torch.nn.Module:
    """Reads a fixture in float32. The settings of generation in its folder do not apply."""
    auto = AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else AutoModelForCausalLM
    model = auto.from_pretrained(FIXTURES / name, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig()
    Watched(model)
    return model


@torch.no_grad()
def run(model: torch.nn.Module, search: Search, width: int, penalty: float, stopping: bool | str) -> dict:
    """Returns an entry of `runs`. Raises `Unclear`."""
    start = search.prompt[: len(search.prompt) - search.forced]
    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=stopping,
        max_new_tokens=search.max_tokens + search.forced,
        min_new_tokens=search.min_tokens + search.forced if search.min_tokens else None,
        eos_token_id=search.end_tokens or None,
        forced_bos_token_id=search.prompt[-1] if search.forced else None,
        decoder_start_token_id=None if search.source is None else start[0],
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([start])
    inputs = {"inputs": ids}
    if search.source is not None:
        inputs = {"inputs": torch.tensor([search.source]), "decoder_input_ids": ids}
    mask = torch.ones_like(inputs["inputs"])
    out = model.generate(**inputs, attention_mask=mask, generation_config=config)
    sequences = [ended(search, row[len(search.prompt) :]) for row in out.sequences.tolist()]
    scores = out.sequences_scores
    clear(scores[:-1] - scores[1:])
    for tokens, score in zip(sequences, scores.tolist()):
        assert abs(score - score_of(model, search, tokens, penalty)) < TOLERANCE
    return {
        "width": width,
        "length_penalty": penalty,
        "early_stopping": stopping,
        "sequences": sequences,
        "scores": [round(score, 6) for score in scores.tolist()],
    }


def ended(search: Search, row: list[int]) -> list[int]:
    """Returns a returned sequence without the padding after its end token."""
    row = row[: search.max_tokens]
    for at, token in enumerate(row):
        if token in search.end_tokens:
            return row[: at + 1]
    return row


def score_of(model: torch.nn.Module, search: Search, tokens: list[int], penalty: float) -> float:
    """Returns the sum of the tokens' log-probabilities divided by the penalty, from one pass without a cache."""
    ids = search.prompt + tokens
    inputs = {"input_ids": torch.tensor([ids])}
    if search.source is not None:
        inputs = {"input_ids": torch.tensor([search.source]), "decoder_input_ids": inputs["input_ids"]}
    table = torch.log_softmax(model(**inputs, use_cache=False).logits[0].double(), dim=-1)
    first = len(search.prompt)
    total = float(table[first - 1 : -1].gather(1, torch.tensor(ids[first:])[:, None]).sum())
    return total / (len(tokens) + search.forced) ** penalty


def run_all(model: torch.nn.Module, search: Search, settings: list[tuple]) -> dict:
    """Returns an entry of `searches`. A few unclear runs are left out; raises `Unclear` if they are more."""
    runs = []
    for tried, setting in enumerate(settings):
        try:
            runs.append(run(model, search, *setting))
        except Unclear:
            if tried - len(runs) >= len(settings) // 6:
                raise
    return {
        **({} if search.source is None else {"source": search.source}),
        "prompt": search.prompt,
        "forced": search.forced,
        "end_tokens": search.end_tokens,
        "max_tokens": search.max_tokens,
        "min_tokens": search.min_tokens,
        "runs": runs,
    }


def good_ends(model: torch.nn.Module, search: Search, count: int) -> list[int]:
    """Returns `count` of the tokens that beams without an end token reach, with which some of eight results end
    early, at several lengths. Raises `Unclear`."""
    free = run(model, replace(search, end_tokens=[], min_tokens=0), 8, 1.0, False)
    reached = sorted({token for tokens in free["sequences"] for token in tokens[2:]})
    for ends in itertools.combinations(reached, count):
        try:
            found = run(model, replace(search, end_tokens=list(ends)), 8, 1.0, False)["sequences"]
        except Unclear:
            continue
        lens = {len(tokens) for tokens in found if tokens[-1] in ends}
        if len(lens) >= (2 if search.min_tokens else 3) and {tokens[-1] for tokens in found} >= set(ends):
            return list(ends)
    raise Unclear


def first_clear(
    model: torch.nn.Module, search: Search, settings: list[tuple], n_words: int, n_ends: int, random
) -> dict:
    """Returns the results for the first random prompt (of an encoder-decoder: encoder input) that has clear and varied
    ones."""
    for _ in range(TRIES):
        words = random.integers(FIRST_WORD, model.config.vocab_size, n_words).tolist()
        changes = {"prompt": [BOS, *words]} if search.source is None else {"source": words}
        drawn = replace(search, **changes)
        try:
            ends = good_ends(model, drawn, n_ends) if n_ends else []
            recorded = run_all(model, replace(drawn, end_tokens=ends), settings)
        except Unclear:
            continue
        if settings is SOME or stops_differ(recorded["runs"]):
            return recorded
    raise SystemExit("no prompt gives clear results")


def stops_differ(runs: list[dict]) -> bool:
    """Returns whether the way of stopping changes some result."""
    first = {}
    return any(
        first.setdefault((entry["width"], entry["length_penalty"]), entry["sequences"]) != entry["sequences"]
        for entry in runs
    )


def searches(name: str, model: torch.nn.Module) -> list[dict]:
    """Returns the searches of a model: with all settings; longer ones with two end tokens; short ones with a minimum
    length; and for some models without end tokens, and with a forced BOS."""
    random = np.random.default_rng([*name.encode()])
    start = ENCODER_DECODERS.get(name)
    plain = Search(start or [], None if start is None else [], 0, [], 16, 0)
    found = [
        first_clear(model, plain, ALL, 5, 1, random),
        first_clear(model, replace(plain, max_tokens=24), SOME, 19, 2, random),
        first_clear(model, replace(plain, max_tokens=8, min_tokens=4), SOME, 3, 1, random),
    ]
    if name == "gqa":
        found.append(first_clear(model, replace(plain, max_tokens=12), SOME, 2, 0, random))
    if start is not None and len(start) == 2:
        found.append(first_clear(model, replace(plain, forced=1), SOME, 9, 1, random))
    return found


def make(name: str):
    found = searches(name, load(name))
    content = {"model": name, "margin": MARGIN, "searches": found}
    path = OUT / f"{name.removeprefix('families/')}.json"
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    runs = [(search, entry) for search in found for entry in search["runs"]]
    early = sum(entry["sequences"][0][-1] in search["end_tokens"] for search, entry in runs)
    size = path.stat().st_size / 1000
    print(f"{name:20} {size:5.1f} kB  {len(runs)} runs, the best ends early in {early}", flush=True)


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = [*DECODERS, *ENCODER_DECODERS]
    if unknown := set(sys.argv[1:]) - set(names):
        raise SystemExit(f"no such model: {', '.join(sorted(unknown))}")
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or names:
        make(name)


if __name__ == "__main__":
    main()
