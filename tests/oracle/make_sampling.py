"""Writes tests/fixtures/sampling/answers.json: the probability of every token under each sampling strategy, on held
logits and a held history, computed from the strategies' formulas in float64.

    python tests/oracle/make_sampling.py

Needs only numpy. No code is shared with the program.
"""

import json
import math
from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "sampling" / "answers.json"
VOCAB = 24
DRAWS = 50_000
END_TOKENS = [1]
THINKING = (20, [21, 22])
PROMPT = [3, 7, 4, 9, 2, 7, 4, 5, 12]
GENERATED = [7, 4, 9, 11, 3, 3, 7, 4]


def held_logits() -> np.ndarray:
    """Returns logits that are multiples of 1/64, so that they are exact in float32."""
    rng = np.random.default_rng(20)
    return np.round(rng.normal(0.0, 1.6, VOCAB) * 64) / 64


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def order(x: np.ndarray) -> np.ndarray:
    return np.argsort(-x, kind="stable")


def only(x: np.ndarray, ids) -> np.ndarray:
    """Returns the logits with all other tokens removed."""
    kept = np.full(len(x), -np.inf)
    ids = np.array(ids)
    kept[ids] = x[ids]
    return kept


def entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


# Filters: logits to logits.


def temperature(x, t):
    return x / t


def dynamic_temperature(x, t, spread, exponent):
    p = softmax(x)
    h = entropy(p) / math.log((x > -np.inf).sum())
    low, high = max(t - spread, 0.0), t + spread
    return x / (low + (high - low) * h**exponent)


def top_k(x, k):
    return only(x, order(x)[:k])


def top_p(x, p):
    ranked = order(x)
    return only(x, ranked[: int((np.cumsum(softmax(x)[ranked]) < p).sum()) + 1])


def min_p(x, p):
    q = softmax(x)
    return only(x, np.flatnonzero(q >= p * q.max()))


def typical(x, mass):
    finite = np.flatnonzero(x > -np.inf)
    p = softmax(x)
    distance = np.abs(-np.log(p[finite]) - entropy(p))
    ranked = finite[np.argsort(distance, kind="stable")]
    return only(x, ranked[: int((np.cumsum(p[ranked]) < mass).sum()) + 1])


def tail_free(x, z):
    ranked = order(x)
    bend = np.abs(np.diff(softmax(x)[ranked], 2))
    above = np.flatnonzero(np.cumsum(bend / bend.sum()) > z)
    return only(x, ranked[: max(above[0], 1)]) if len(above) else x


def top_n_sigma(x, n):
    finite = x[x > -np.inf]
    return only(x, np.flatnonzero(x >= x.max() - n * finite.std()))


def cutoff(x, least):
    p = softmax(x)
    ids = np.flatnonzero(p >= least)
    return only(x, ids if len(ids) else [order(x)[0]])


def eta(x, epsilon):
    return cutoff(x, min(epsilon, math.sqrt(epsilon) * math.exp(-entropy(softmax(x)))))


def xtc(x, threshold):
    p = softmax(x)
    ranked = order(x)
    above = int((p >= threshold).sum())
    return only(x, ranked[above - 1 :]) if above >= 2 else x


def mirostat_2(x, mu):
    p = softmax(x)
    ranked = order(x)
    kept = [i for i in ranked if p[i] > 0 and -math.log2(p[i]) <= mu]
    return only(x, kept or [ranked[0]])


def mirostat_1(x, mu):
    p = softmax(x)[order(x)][:100]
    n = (x > -np.inf).sum()
    t = np.array([math.log((i + 2) / (i + 1)) for i in range(len(p) - 1)])
    b = np.log(p[:-1] / p[1:])
    s = (t * b).sum() / (t * t).sum()
    e = s - 1
    return top_k(x, max(int(((e * 2**mu) / (1 - float(n) ** -e)) ** (1 / s)), 1))


# Edits: logits and the history to logits.


def penalties(x, repetition=1.0, presence=0.0, frequency=0.0, last_n=None):
    tokens = PROMPT + GENERATED
    first = 0 if last_n is None else len(tokens) - last_n
    x = x.copy()
    for token in set(tokens[first:]):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        count = sum(1 for i, t in enumerate(tokens) if t == token and i >= max(first, len(PROMPT)))
        x[token] -= frequency * count + presence * (count > 0)
    return x


def no_repeat(x, n):
    tokens = PROMPT + GENERATED
    x = x.copy()
    for i in range(len(tokens) - n + 1):
        if tokens[i : i + n - 1] == tokens[len(tokens) - n + 1 :]:
            x[tokens[i + n - 1]] = -np.inf
    return x


def dry(x, multiplier, base, allowed, breakers=()):
    tokens = PROMPT + GENERATED
    longest = {}
    for i in range(len(tokens)):
        length = 0
        while length < i and tokens[i - 1 - length] == tokens[-1 - length] and tokens[-1 - length] not in breakers:
            length += 1
        if length >= allowed:
            longest[tokens[i]] = max(length, longest.get(tokens[i], 0))
    x = x.copy()
    for token, length in longest.items():
        x[token] -= multiplier * base ** (length - allowed)
    return x


def forbid(x, ids):
    x = x.copy()
    x[ids] = -np.inf
    return x


def bias(x, biases):
    x = x.copy()
    for token, value in biases.items():
        x[token] += value
    return x


# Strategies of Inferflow: everything within a pool.


def pool(x, size=10):
    return top_k(x, size)


def prefix(x, p, least, most):
    ranked = order(x)
    kept = int((np.cumsum(softmax(x)[ranked]) < p).sum()) + 1
    return only(x, ranked[: min(max(kept, least), most)])


def pool_tail_free(x, z):
    ranked = [i for i in order(x) if x[i] > -np.inf]
    bend = np.abs(np.diff(softmax(x)[ranked], 2))
    bend = bend / bend.sum() if bend.sum() > 1e-6 else np.full(len(bend), 1 / len(bend))
    kept, running = 1, 0.0
    for weight in bend[1:]:
        running += weight
        if running > z:
            break
        kept += 1
    return only(x, ranked[:kept])


def pool_typical(x, mass):
    ids = np.flatnonzero(x > -np.inf)
    p = softmax(x)
    ranked = ids[np.argsort(np.abs(-np.log(p[ids]) - entropy(p)), kind="stable")]
    return only(x, ranked[: 1 + int((np.cumsum(p[ranked[1:]]) <= mass).sum())])


def ngram_penalty(tokens, n, beta, token):
    penalty, left = 0.0, 1.0
    for i in range(n - 1, -1, -1):
        followers = [tokens[j + i] for j in range(len(tokens) - i) if tokens[j : j + i] == tokens[len(tokens) - i :]]
        if token not in followers:
            continue
        count, total = followers.count(token), len(followers)
        penalty += left * beta * count / (total + 1) if i else left * count / total
        left *= 1 - beta
    return penalty


def fsd(x, k=6, alpha=0.5, n=3, beta=0.9):
    p = softmax(x)
    first = order(x)[:k]
    score = [(1 - alpha) * p[i] - alpha * ngram_penalty(PROMPT + GENERATED, n, beta, i) for i in first]
    return only(x, [first[int(np.argmax(score))]])


def mixed(share, a, b):
    return share * softmax(a) + (1 - share) * softmax(b)


def cases(x: np.ndarray):
    """Yields the parameters of a request, and the probabilities that they mean."""
    yield {}, softmax(x)
    yield {"temperature": 0.7}, softmax(x / 0.7)
    yield {"top_k": 5}, softmax(top_k(x, 5))
    yield {"top_p": 0.8}, softmax(top_p(x, 0.8))
    yield {"min_p": 0.1}, softmax(min_p(x, 0.1))
    yield (
        {"temperature": 1.5, "top_k": 12, "top_p": 0.85, "min_p": 0.15},
        softmax(min_p(top_p(top_k(x / 1.5, 12), 0.85), 0.15)),
    )
    yield {"typical_p": 0.3}, softmax(typical(x, 0.3))
    yield {"tfs_z": 0.8}, softmax(tail_free(x, 0.8))
    yield {"top_n_sigma": 1.25}, softmax(top_n_sigma(x, 1.25))
    yield {"epsilon_cutoff": 0.03}, softmax(cutoff(x, 0.03))
    yield {"eta_cutoff": 0.4}, softmax(eta(x, 0.4))
    yield {"xtc_probability": 0.5, "xtc_threshold": 0.1}, mixed(0.5, xtc(x, 0.1), x)
    yield (
        {"temperature": 0.9, "dynatemp_range": 0.6, "dynatemp_exponent": 1.5},
        softmax(dynamic_temperature(x, 0.9, 0.6, 1.5)),
    )
    yield {"mirostat": 2, "mirostat_tau": 1.6}, softmax(mirostat_2(x, 3.2))
    yield {"mirostat": 1, "mirostat_tau": 1.6, "top_k": 1}, softmax(mirostat_1(x, 3.2))
    yield {"repetition_penalty": 1.5}, softmax(penalties(x, 1.5))
    yield (
        {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": 10},
        softmax(penalties(x, 1.3, 0.5, 0.25, 10)),
    )
    yield {"no_repeat_ngram_size": 3}, softmax(no_repeat(x, 3))
    yield (
        {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 1, "dry_sequence_breakers": []},
        softmax(dry(x, 0.8, 1.75, 1)),
    )
    yield (
        {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": ["h", "m"]},
        softmax(dry(x, 1.5, 1.75, 1, (7, 12))),
    )
    yield {"bad_words": [[8], [4, 15], [7, 4, 16], [9, 17]]}, softmax(forbid(x, [8, 15, 16]))
    yield {"allowed_token_ids": [2, 5, 9, 23]}, softmax(only(x, [2, 5, 9, 23]))
    yield {"logit_bias": {"6": 1.5, "a": -2.0, "19": False}}, softmax(forbid(bias(x, {6: 1.5, 0: -2.0}), [19]))
    yield {"min_tokens": 9}, softmax(forbid(x, END_TOKENS))
    yield {"min_tokens": 8}, softmax(x)
    yield {"samplers": ["top_p", "temperature"], "top_p": 0.7, "temperature": 2.0}, softmax(top_p(x, 0.7) / 2.0)
    yield (
        {"samplers": ["penalties", "temperature"], "temperature": 0.8, "frequency_penalty": 0.5, "top_k": 1},
        softmax(penalties(x, frequency=0.5) / 0.8),
    )

    def named(name, **params):
        return {"strategy": name, "strategy_params": {"pool_size": 10, **params}}

    p = pool(x)
    yield named("sample.std", top_p=0.75, max_k=8), softmax(prefix(p, 0.75, 1, 8))
    yield named("sample.std", top_p=0.99, max_k=4), softmax(prefix(p, 0.99, 1, 4))
    yield named("top_k", max_k=6), softmax(prefix(p, 1.0, 6, 6))
    yield named("min_p", min_p=0.3), softmax(min_p(p, 0.3))
    yield named("tfs", z=0.5), softmax(pool_tail_free(p, 0.5))
    yield named("typical", p=0.5), softmax(pool_typical(p, 0.5))
    yield named("mirostat", tau=1.3), softmax(mirostat_2(p, 2.6))
    yield {**named("fsd"), "temperature": 2.0}, softmax(fsd(pool(x / 2.0)))
    yield (
        {**named("random_fsd", max_k=5), "temperature": 2.0},
        mixed(0.5, fsd(pool(x / 2.0)), prefix(pool(x / 2.0), 0.93, 1, 5)),
    )


def critical(freedom: int) -> float:
    """Returns the chi-square value that a true distribution exceeds once in 1000 times."""

    def upper(value: float) -> float:
        # The regularized upper incomplete gamma function, from the series of the lower one.
        a, z = freedom / 2, value / 2
        term = total = 1 / a
        for k in range(1, 2000):
            term *= z / (a + k)
            total += term
        return 1 - total * math.exp(-z + a * math.log(z) - math.lgamma(a))

    low, high = 1e-3, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if upper(middle) > 1e-3 else (low, middle)
    return low


def main():
    x = held_logits()
    entries = []
    for params, p in cases(x):
        freedom = int((p > 0).sum()) - 1
        entries.append(
            {
                "params": params,
                "probabilities": [round(float(value), 9) for value in p],
                "critical": round(critical(freedom), 3) if freedom else 0.0,
            }
        )
    answers = {
        "draws": DRAWS,
        "end_tokens": END_TOKENS,
        "thinking": THINKING,
        "prompt": PROMPT,
        "generated": GENERATED,
        "logits": x.tolist(),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in answers.items()]
    cases_text = ",\n".join("  " + json.dumps(entry) for entry in entries)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("{\n" + "\n".join(lines) + '\n "cases": [\n' + cases_text + "\n ]\n}\n")


if __name__ == "__main__":
    main()
