"""Measures what an interactive client sees of a tenfold batch overload.

    cargo build --release --workspace
    python3 load_tests/tenancy.py [--model MODEL] [options]

Starts the server with two API keys. First the interactive client sends its requests alone, then beside ten times
as many users of the batch client as there are slots. Passes if the p99 of the interactive client's time to first
token is below twice its unloaded value plus two loaded steps.
"""

import argparse
import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

# Seconds that a process has to end, and a page of metrics to arrive.
PATIENCE = 30
KEYS = {"interactive": "interactive-key", "batch": "batch-key"}


def seconds(text):
    """Parses a time limit, which must be finite."""
    limit = float(text)
    if not 0 < limit < math.inf:
        raise ValueError(text)
    return limit


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
    parser.add_argument("--start-limit", type=seconds, default=300, help="seconds for the server to load its model")
    parser.add_argument("--run-limit", type=seconds, default=1800, help="seconds for each run, and to fill the queue")
    return parser.parse_args()


def stop(process):
    """Ends a process and waits for it."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


def start(command, started, **streams):
    """Starts a process, which `started` ends."""
    process = subprocess.Popen(command, **streams)
    started.callback(stop, process)
    return process


def poll(limit, what):
    """Yields until `limit` seconds are over, and ends the program then."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        yield
        time.sleep(0.1)
    sys.exit(f"{what} takes longer than {limit:.0f} s")


def start_server(options, folder, started):
    """Starts the server. Returns its URL."""
    keys = folder / "keys"
    keys.write_text("".join(f"{key} name={name} class={name}\n" for name, key in KEYS.items()))
    waiting = options.slots * (options.overload + 1)
    command = [f"{options.target}/mainstem", "serve", options.model, "--port", "0", "--api-key-file", str(keys)]
    command += ["--slots", str(options.slots), "--max-waiting", str(waiting), *options.server_flags.split()]
    log = folder / "server.log"
    with log.open("w") as stderr:
        server = start(command, started, stderr=stderr)
    for _ in poll(options.start_limit, "loading the model"):
        found = re.search(r"listening on (\S+)\s", log.read_text())
        if found:
            return re.sub(r"\x1b\[[0-9;]*m", "", found[1])
        if server.poll() is not None:
            sys.exit(log.read_text())


def client_command(options, url, folder, name, *flags):
    """Returns the command of a load by one client."""
    key = folder / f"{name}.key"
    key.write_text(KEYS[name] + "\n")
    command = [f"{options.target}/load_tests", "run", "--url", url, "--api-key-file", str(key)]
    return [*command, "--metrics-url", "none", *flags]


def interactive(options, url, folder, started, seed):
    """Runs the interactive client. Returns its results."""
    results = folder / f"{seed}.json"
    flags = ["--arrivals", f"poisson:{options.rate}", "--requests", str(options.requests), "--seed", str(seed)]
    flags += ["--prompt-tokens", options.prompt_tokens, "--output-tokens", options.output_tokens]
    flags += ["--warmups", "3", "--json", str(results)]
    command = client_command(options, url, folder, "interactive", *flags)
    client = start(command, started, stdout=subprocess.DEVNULL)
    try:
        client.wait(options.run_limit)
    except subprocess.TimeoutExpired:
        sys.exit(f"the interactive client takes longer than {options.run_limit:.0f} s")
    # Exit status 1 means that requests failed: they are among the results.
    if client.returncode not in (0, 1):
        sys.exit(f"the interactive client ended with {client.returncode}")
    return json.loads(results.read_text())


def metrics(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
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


def measure(options, folder, started):
    """Returns the results of the interactive client alone and under overload, and the metrics before and after it."""
    url = start_server(options, folder, started)
    alone = interactive(options, url, folder, started, 1)
    users = options.slots * options.overload
    flags = ["--arrivals", f"users:{users}", "--requests", "1000000", "--seed", "9"]
    flags += ["--time-limit", str(math.ceil(3 * options.run_limit))]
    flags += ["--prompt-tokens", options.batch_prompt_tokens, "--output-tokens", options.batch_output_tokens]
    command = client_command(options, url, folder, "batch", *flags)
    batch = start(command, started, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in poll(options.run_limit, "filling the queue"):
        if total(metrics(url), "mainstem_num_requests_waiting") >= users - 2 * options.slots:
            break
        if batch.poll() is not None:
            sys.exit("the batch client ended")
    before = metrics(url)
    loaded = interactive(options, url, folder, started, 2)
    return alone, loaded, before, metrics(url)


def main():
    options = arguments()
    # So that SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # What was started last ends first, and the folder is removed at the end, whatever happens.
    with tempfile.TemporaryDirectory(prefix="tenancy-") as folder, contextlib.ExitStack() as started:
        alone, loaded, before, after = measure(options, Path(folder), started)
    users = options.slots * options.overload
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
    # Beyond the last bucket there is no upper bound, and no limit to pass.
    passed = math.isfinite(limit) and loaded["p99_ttft_ms"] < limit and not loaded["failed"] and not alone["failed"]
    print(f"limit 2 x unloaded + 2 loaded steps = {limit:.1f} ms: {'passed' if passed else 'FAILED'}")
    print(f"with the mean step: {2 * alone['p99_ttft_ms'] + 2 * mean:.1f} ms")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
