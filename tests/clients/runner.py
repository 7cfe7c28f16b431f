"""Runs the checks of a session, and prints a line for each: "ok NAME", "FAILED NAME: why" or "skipped NAME: why"."""

import traceback

CHECKS = []


def check(*kinds):
    """Registers a check, which gets a server of each of these kinds."""

    def register(function):
        CHECKS.append((title(function), kinds, function))
        return function

    return register


def title(function):
    return function.__name__.replace("_", " ")


def run_checks(servers, only=""):
    """Runs the registered checks whose names contain `only`, each if its servers are there. Returns whether none failed."""
    passed = True
    for name, kinds, function in CHECKS:
        if only not in name:
            continue
        needed = [servers[kind] for kind in kinds]
        if all(needed):
            passed &= run(name, function, *needed)
        else:
            print(f"skipped {name}: no such server was named", flush=True)
    return passed


def run(name, function, *arguments):
    """Runs a check, and returns whether it passed."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        code = function.__code__
        frames = traceback.extract_tb(error.__traceback__)
        lines = [code.co_firstlineno, *(frame.lineno for frame in frames if frame.filename == code.co_filename)]
        why = " ".join(str(error).split())[:2500]
        print(f"FAILED {name}: line {lines[-1]}: {type(error).__name__}: {why}", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True
