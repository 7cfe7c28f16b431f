"""Compares the speed of Mainstem with that of llama.cpp on one machine, and prints the table of docs/performance.md.

    python tools/against_llama_cpp.py --mainstem target/release/mainstem --llama llama.cpp/build/bin \
        --models models --rounds 7 --threads 2

`--models` is a folder with 1.1B-F16.gguf (from tools/random_llama.py) and the outputs of `llama-quantize` and
`mainstem quantize`: 1.1B-BF16.gguf, 1.1B-Q8_0.gguf, 1.1B-Q4_0.gguf, and the folders 1.1B-q3h_b64t1 and 1.1B-q4_b64t1.
Tests of missing files are skipped.

The speed of a machine drifts, so the programs alternate: a round runs each test once with each program, and ratios
are computed per round. The printed values are medians over the rounds. Each run begins with a warm-up. Prompts of
fused decode have 128 tokens; llama.cpp's sequences share theirs, so that it is evaluated once, while attention reads
as much as for separate prompts.

Invariant: every printed value was measured in this run, by the same tests for both programs.
"""

import argparse
import json
import subprocess
import statistics
from dataclasses import dataclass, field
from pathlib import Path

PREFILL, SEQUENCES, FUSED_PROMPT = 512, 32, 128


@dataclass
class Row:
    """A test: its name, both model files, and the tokens per second and fraction of the roofline of every round."""

    name: str
    ours_file: str
    theirs_file: str | None
    test: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    limit: str = ""
    read: list[float] = field(default_factory=list)


def gguf(ty: str) -> str:
    return f"1.1B-{ty}.gguf"


ROWS = [
    *[Row(f"decode, 1 sequence, {ty}", gguf(ty), gguf(ty), "decode") for ty in ["F16", "Q8_0", "Q4_0"]],
    *[Row(f"prefill {PREFILL}, {ty}", gguf(ty), gguf(ty), "prefill") for ty in ["F16", "Q8_0", "Q4_0"]],
    Row(f"prefill {PREFILL}, Mainstem BF16 vs. llama.cpp F16", gguf("BF16"), gguf("F16"), "prefill"),
    *[Row(f"fused decode, {SEQUENCES} sequences, {ty}", gguf(ty), gguf(ty), "fused") for ty in ["F16", "Q8_0", "Q4_0"]],
    Row("decode, Mainstem Q3H vs. Mainstem Q4_B64", "1.1B-q3h_b64t1", None, "decode"),
]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


class Bench:
    """Runs both programs with the given threads and lengths. `reports` has Mainstem's reports of this round, by file
    and whether the test is fused decode."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.reports: dict[tuple[str, bool], dict] = {}

    def ours(self, file: str, test: str) -> tuple[float, float | None, str, float]:
        """Returns the tokens per second, the fraction of the roofline, the bottleneck, and the measured read
        bandwidth in bytes per second."""
        report = self.report(file, test == "fused")
        name = {"prefill": "prefill", "decode": "decode", "fused": "fused decode"}[test]
        row = next(row for row in report["rows"] if row["test"] == name)
        share = row["share"] and row["share"]["median"]
        return row["tokens_per_s"]["median"], share, row["limit"] or "", row["samples"][0]["roofline"]["read"]

    def report(self, file: str, fused: bool) -> dict:
        """Returns the report of `mainstem bench` for a file, which runs once per round."""
        if (file, fused) not in self.reports:
            args = self.args
            several = ["--sequences", str(SEQUENCES), "--fused-depth", str(FUSED_PROMPT), "--prefill", "1"]
            what = several if fused else ["--sequences", "1", "--prefill", str(PREFILL)]
            command = [args.mainstem, "bench", str(args.models / file), "--threads", str(args.threads), *what]
            command += ["--repeat", "1", "--depth", "0", "--decode", str(args.decode), "--format", "json"]
            self.reports[file, fused] = json.loads(run(command))
        return self.reports[file, fused]

    def theirs(self, file: str, test: str) -> float:
        args, model = self.args, ["-m", str(self.args.models / file)]
        threads = ["-t", str(args.threads)]
        if test == "fused":
            lengths = ["-npp", str(FUSED_PROMPT), "-ntg", str(args.decode), "-npl", str(SEQUENCES), "-pps"]
            room = ["-c", str(FUSED_PROMPT + SEQUENCES * (args.decode + 8)), "--output-format", "jsonl"]
            out = run([f"{args.llama}/llama-batched-bench", *model, *threads, *lengths, *room])
            return json.loads(next(line for line in out.splitlines() if line.startswith("{")))["speed_tg"]
        lengths = ["-p", str(PREFILL), "-n", "0"] if test == "prefill" else ["-p", "0", "-n", str(args.decode)]
        out = run([f"{args.llama}/llama-bench", *model, *threads, *lengths, "-r", "1", "-o", "json"])
        return json.loads(out)[0]["avg_ts"]


def measure(bench: Bench, row: Row) -> None:
    tokens, share, limit, read = bench.ours(row.ours_file, row.test)
    row.ours.append(tokens)
    row.read.append(read)
    row.limit = limit
    if share is not None:
        row.share.append(share)
    if row.theirs_file is None:
        row.theirs.append(bench.ours("1.1B-q4_b64t1", row.test)[0])
    else:
        row.theirs.append(bench.theirs(row.theirs_file, row.test))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def table(rows: list[Row]) -> None:
    print("| test | rounds | Mainstem, tok/s | llama.cpp, tok/s | ratio | of roofline | read bandwidth, GB/s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ratios = [ours / theirs for ours, theirs in zip(row.ours, row.theirs)]
        share = f"{100 * statistics.median(row.share):.0f} % ({row.limit})" if row.share else ""
        read = f"{statistics.median(row.read) / 1e9:.1f}"
        cells = [row.name, len(ratios), spread(row.ours), spread(row.theirs), spread(ratios), share, read]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mainstem", default="target/release/mainstem")
    parser.add_argument("--llama", required=True, type=Path, help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--models", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, default=32, help="tokens to decode per sequence")
    parser.add_argument("--only", default="", help="run only tests whose name contains this text, such as fused")
    parser.add_argument("--without", default="none", help="skip tests whose name contains this text")
    args = parser.parse_args()
    is_there = lambda row: all((args.models / file).exists() for file in [row.ours_file, row.theirs_file or "1.1B-q4_b64t1"])
    rows = [row for row in ROWS if args.only in row.name and args.without not in row.name and is_there(row)]
    # Tests of one file are adjacent, so that the programs alternate within a minute.
    rows.sort(key=lambda row: (row.test == "fused", row.ours_file))
    bench = Bench(args)
    for number in range(args.rounds):
        bench.reports.clear()
        for row in rows:
            measure(bench, row)
        print(f"after round {number + 1}", flush=True)
        table(rows)


if __name__ == "__main__":
    main()
