"""Makes tests/fixtures/families: a tiny random checkpoint of every model family, and its outputs.

    python tests/oracle/make_families.py [NAME ...]

Each folder looks like a repository of the family, plus answers.json (described in README.md). All share one tokenizer
with whole words. The cases are in the tables of `families/`.

Invariant: the recorded outputs were recomputed from the folder as written, if the library can read it, and every
weight in it changes them, except those that are known not to matter.
"""

import copy
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from families import answers, layout, reference, words
from families.case import FIXTURES, NOTICED, Case
from families.table import CASES
from transformers.utils import logging


SPEC = "spec.toml"  # of families without a shipped specification: written by hand, and kept


def search(case: Case) -> tuple[int, torch.nn.Module, dict]:
    """Returns the first seed whose outputs are clear."""
    for seed in range(500):
        model = reference.randomise(case, seed)
        try:
            return seed, model, answers.record_all(case, model, seed)
        except answers.Unclear:
            pass
    raise SystemExit(f"{case.name}: no seed gives clear answers")


def make(case: Case):
    """Replaces the case's folder after all checks of its new contents."""
    seed, model, recorded = search(case)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / case.name
        write_json(folder / "config.json", written_config(case), indent=2)
        for path, content in case.files.items():
            write_json(folder / path, content, indent=2)
        layout.write(case, folder, model)
        stored = reference.read_back(case, folder, model)
        assert agree(answers.record_all(case, stored, seed), recorded), (
            f"{case.name}: the folder holds another model"
        )
        check_matters(case, stored, recorded)
        write_json(folder / "answers.json", head(case, seed) | recorded)
        if (case.folder / SPEC).exists():
            shutil.copy(case.folder / SPEC, folder)
        shutil.rmtree(case.folder, ignore_errors=True)
        shutil.move(folder, case.folder)
    report(case, seed, recorded)


def agree(a, b) -> bool:
    """Returns whether two records are equal but for the rounding of sums, which depends on memory addresses."""
    if isinstance(a, float):
        return abs(a - b) < 1e-5
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(agree(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(agree(x, y) for x, y in zip(a, b))
    return a == b


def written_config(case: Case) -> dict:
    dtype = {case.dtype_key: str(case.dtype).removeprefix("torch.")} if case.dtype_key else {}
    return dict(sorted((case.config | dtype).items()))


def head(case: Case, seed: int) -> dict:
    eos = case.config.get("eos_token_id")
    return {
        "fixture": case.name,
        "kind": case.kind,
        "reference": case.model.__name__,
        **({"note": case.note} if case.note else {}),
        "seed": seed,
        "eos_token_ids": [] if eos is None else [eos],
    }


@torch.no_grad()
def check_matters(case: Case, model: torch.nn.Module, recorded: dict):
    """Checks that every weight, and every setting in the case's `matters`, changes the recorded outputs."""
    before = answers.fingerprint(case, model, recorded)

    def difference(other: torch.nn.Module) -> float:
        return float((before - answers.fingerprint(case, other, recorded)).abs().max())

    for name, weight in reference.weights_of(case, model):
        if re.search(case.neutral, name):
            continue
        for part in weight if weight.dim() == 3 else [weight]:  # every expert separately
            kept = part.clone()
            part.add_(0.3 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
            assert difference(model) > 10 * NOTICED, f"{case.name}: {name} does nothing"
            part.copy_(kept)
    for key, value in case.matters.items():
        other = reference.build(case, copy.deepcopy(case.config) | {key: value})
        other.load_state_dict(model.state_dict())
        assert difference(other) > NOTICED, f"{case.name}: {key} does nothing"


def write_json(path: Path, content, indent: int | None = None):
    path.parent.mkdir(parents=True, exist_ok=True)
    separators = (",", ":") if indent is None else None
    path.write_text(
        json.dumps(content, indent=indent, separators=separators, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def report(case: Case, seed: int, recorded: dict):
    size = sum(file.stat().st_size for file in case.folder.rglob("*") if file.is_file())
    margins = [entry["margin"] for entry in recorded.get("answers", [])]
    margin = f"margin {min(margins):.4f}" if margins else ""
    print(f"\r{case.name:20} seed {seed:4}  {size / 1000:6.1f} kB  {margin}", flush=True)


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = sys.argv[1:]
    if unknown := set(wanted) - {case.name for case in CASES}:
        raise SystemExit(f"no such fixture: {', '.join(sorted(unknown))}")
    write_json(FIXTURES / "tokenizer.json", words.tokenizer())
    write_json(FIXTURES / "tokenizer_config.json", words.tokenizer_config(), indent=2)
    for case in CASES:
        if not wanted or case.name in wanted:
            make(case)


if __name__ == "__main__":
    main()
