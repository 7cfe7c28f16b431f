"""Measures what an interactive client sees of a tenfold batch overload.

    cargo build --release --workspace
    python3 load_tests/tenancy.py [--model MODEL] [options]

Starts the server with two API keys. First the interactive client sends its requests alone, then beside ten times
as many users of the batch client as there are slots. Passes if the p99 of the interactive client's time to first
token is below twice its unloaded value plus two loaded steps.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

KEYS = {"interactive": "interactive-key", "batch": "batch-key"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="target/release", help="folder of the programs")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--overload", type=int, default=10, help="batch users for each slot")
    parser.add_argument("--rate", default="2/s", help="interactive requests")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--prompt-tokens", default="64", help="of interactive requests")
    parser.add_argument("--output-tokens", default="16", help="of interactive requests")
    parser.add_argument("--batch-prompt-tokens", default="32-200")
    parser.add_argument("--batch-output-tokens", default="50-200")
    parser.add_argument("--server-flags", default="", help="further flags of the server, separated by spaces")
    return parser.parse_args()


def start_server(options, folder):
    keys = folder / "keys"
    keys.write_text("".join(f"{key} name={name} class={name}\n" for name, key in KEYS.items()))
    waiting = options.slots * (options.overload + 1)
    command = [f"{options.target}/mainstem", "serve", options.model, "--port", "0", "--api-key-file", str(keys)]
    command += ["--slots", str(options.slots), "--max-waiting", str(waiting), *options.server_flags.split()]
    log = open(folder / "server.log", "w+")
    server = subprocess.Popen(command, stderr=log)
    while True:
        found = re.search(r"listening on (\S+)", (folder / "server.log").read_text())
        if found:
            return server, re.sub(r"\x1b\[[0-9;]*m", "", found[1])
        if server.poll() is not None:
            sys.exit((folder / "server.log").read_text())
        time.sleep(0.05)


def client_command(options, url, folder, name, *flags):
    """Returns the command of a load by one client."""
    key = folder / f"{name}.key"
    key.write_text(KEYS[name] + "\n")
    command = [f"{options.target}/load_tests", "run", "--url", url, "--api-key-file", str(key)]
    return [*command, "--metrics-url", "none", *flags]


def interactive(options, url, folder, seed):
    """Runs the interactive client. Returns its results."""
    results = folder / f"{seed}.json"
    flags = ["--arrivals", f"poisson:{options.rate}", "--requests", str(options.requests), "--seed", str(seed)]
    flags += ["--prompt-tokens", options.prompt_tokens, "--output-tokens", options.output_tokens]
    flags += ["--warmups", "3", "--json", str(results)]
    command = client_command(options, url, folder, "interactive", *flags)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(results.read_text())


def metrics(url):
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, value in samples if value != "NaN"}


def total(figures, name):
    return sum(value for series, value in figures.items() if series.split("{")[0] == name)


def quantile(before, after, name, share):
    """Returns the upper bound of the bucket with this quantile of a histogram's increase, in seconds."""
    bounds = {}
    for series, value in after.items():
        if series.startswith(f"{name}_bucket"):
            bound = re.search(r'le="([^"]+)"', series)[1]
            bounds[float(bound)] = bounds.get(float(bound), 0) + value - before.get(series, 0)
    every = max(bounds.values())
    return next(bound for bound, count in sorted(bounds.items()) if count >= share * every)


def main():
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="tenancy-"))
    server, url = start_server(options, folder)
    batch = None
    try:
        alone = interactive(options, url, folder, 1)
        users = options.slots * options.overload
        flags = ["--arrivals", f"users:{users}", "--requests", "1000000", "--time-limit", "3600", "--seed", "9"]
        flags += ["--prompt-tokens", options.batch_prompt_tokens, "--output-tokens", options.batch_output_tokens]
        command = client_command(options, url, folder, "batch", *flags)
        batch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while total(metrics(url), "mainstem_num_requests_waiting") < users - 2 * options.slots:
            if batch.poll() is not None:
                sys.exit("the batch client ended")
            time.sleep(0.1)
        before = metrics(url)
        loaded = interactive(options, url, folder, 2)
        after = metrics(url)
    finally:
        if batch:
            batch.kill()
        server.terminate()
        server.wait()
    step = "mainstem_step_seconds"
    steps = total(after, f"{step}_count") - total(before, f"{step}_count")
    mean = (total(after, f"{step}_sum") - total(before, f"{step}_sum")) / steps * 1000
    slow = quantile(before, after, step, 0.99) * 1000
    print(f"time to first token, ms     p50 {alone['median_ttft_ms']:8.1f}   p99 {alone['p99_ttft_ms']:8.1f}  alone")
    print(f"                            p50 {loaded['median_ttft_ms']:8.1f}   p99 {loaded['p99_ttft_ms']:8.1f}  overload")
    print(f"a loaded step, ms          mean {mean:8.1f}   p99 {slow:8.1f}  (upper bound of the bucket)")
    name = "mainstem_num_preemptions_total"
    print(f"steps {steps:.0f}, preemptions {total(after, name) - total(before, name):.0f}, users {users}")
    limit = 2 * alone["p99_ttft_ms"] + 2 * slow
    passed = loaded["p99_ttft_ms"] < limit and not loaded["failed"] and not alone["failed"]
    print(f"limit 2 x unloaded + 2 loaded steps = {limit:.1f} ms: {'passed' if passed else 'FAILED'}")
    print(f"with the mean step: {2 * alone['p99_ttft_ms'] + 2 * mean:.1f} ms")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
