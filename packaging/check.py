#!/usr/bin/env python3
"""Makes all packages and tries them: packaging/check.py [--binary FILE] [--glibc VERSION]

Nothing is installed on this machine: packages are unpacked, and the wheel is installed in a virtual environment, all in a
temporary folder. The options are those of package.py. Prints a line for each package, and ends at the first fault.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from package import SHELLS, add_program_options, build, run

PACKAGE = Path(__file__).with_name("package.py")


def packed(kind, binary, glibc, out):
    """Makes a package twice, which must give the same bytes, and compares it with its checksum."""
    limit = ["--glibc", glibc] * (glibc is not None)
    made = []
    for folder in [out / "first", out / "second"]:
        file = run(sys.executable, PACKAGE, kind, "--binary", binary, "--out", folder, *limit)
        made.append(Path(file.decode().strip()))
    first, second = (file.read_bytes() for file in made)
    assert first == second, f"{made[0].name}: two runs gave different bytes"
    line = Path(f"{made[0]}.sha256").read_text()
    expected = f"{hashlib.sha256(first).hexdigest()}  {made[0].name}\n"
    assert line == expected, f"{made[0].name}: the checksum is {line!r}, not {expected!r}"
    return made[0]


def same_program(program, version):
    printed = run(program, "--version").decode()
    assert printed == version, f"{program} --version printed {printed!r}, not {version!r}"


def same_completions(folder, program):
    for shell, place in SHELLS.items():
        expected = run(program, "completions", shell)
        assert len(expected) > 1000, f"{program} completions {shell} printed {expected!r}"
        assert Path(folder, place).read_bytes() == expected, f"{place}: not what the program prints for {shell}"
    subprocess.run(["bash", "-n", Path(folder, SHELLS["bash"])], check=True)


def try_tarball(file, folder, version):
    subprocess.run(["tar", "--extract", "--file", file, "--directory", folder], check=True)
    (top,) = folder.iterdir()
    same_program(top / "mainstem", version)
    same_completions(top, top / "mainstem")


def try_wheel(file, folder, version):
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", file)
    same_program(folder / "bin/mainstem", version)
    shown = run(folder / "bin/python", "-m", "pip", "show", "mainstem").decode()
    assert f"Version: {version.split()[1]}\n" in shown, shown
    run(folder / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "mainstem")
    assert not Path(folder, "bin/mainstem").exists(), "pip uninstall leaves the program"


def try_deb(file, folder, version):
    run("dpkg-deb", "--extract", file, folder)
    same_program(folder / "usr/bin/mainstem", version)
    same_completions(folder / "usr", folder / "usr/bin/mainstem")
    field = run("dpkg-deb", "--field", file, "Version").decode().strip()
    assert field == version.split()[1], f"Version: {field}"
    unit = (folder / "usr/lib/systemd/system/mainstem.service").read_text()
    for path in re.findall(r"^(?:ExecStart|EnvironmentFile)=-?(\S+)", unit, re.MULTILINE):
        assert Path(folder, path.lstrip("/")).is_file(), f"the service needs {path}, which is not in the package"
    secret = folder / "etc/mainstem/environment"
    assert secret.stat().st_mode & 0o077 == 0, f"{secret} is readable to other users"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_program_options(parser)
    options = parser.parse_args()
    binary = (options.binary or build(options.glibc)).resolve()
    version = run(binary, "--version").decode()
    for kind, tried in {"tarball": try_tarball, "wheel": try_wheel, "deb": try_deb}.items():
        with tempfile.TemporaryDirectory() as folder:
            file = packed(kind, binary, options.glibc, Path(folder))
            unpacked = Path(folder, "unpacked")
            unpacked.mkdir()
            tried(file, unpacked, version)
            print(f"ok {file.name}")


if __name__ == "__main__":
    main()
