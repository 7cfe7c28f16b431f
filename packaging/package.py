#!/usr/bin/env python3
"""Packages the program: packaging/package.py tarball|wheel|deb [--binary FILE] [--glibc VERSION] [--out FOLDER]

Without --binary, the program is built first, with `cargo build --release --locked`. The package is written to `dist`, or to
FOLDER, with its SHA-256 in a file beside it. Needs Python and readelf (binutils); for deb also dpkg-deb.

A package runs on systems whose glibc has the symbol versions that the program needs. An ordinary build may need those of the
machine that builds it. With --glibc, say 2.28, the program is built for that version with `cargo zigbuild`
(`pip install cargo-zigbuild ziglang`), and a program that needs a newer one is refused.
"""

import argparse
import base64
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELLS = {
    "bash": "share/bash-completion/completions/mainstem",
    "zsh": "share/zsh/vendor-completions/_mainstem",
    "fish": "share/fish/vendor_completions.d/mainstem.fish",
}
SUMMARY = "Inference server for transformer models"
# Of all files in a package, so that the same program gives the same bytes.
TIME = int(os.environ.get("SOURCE_DATE_EPOCH", "1767225600"))


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout


def build(glibc):
    """Builds the program, for that version of glibc if it is not None, and returns its path."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    wanted = ["--release", "--locked", "--bin", "mainstem"]
    if glibc is None:
        run("cargo", "build", *wanted)
        return target / "release" / "mainstem"
    triple = f"{platform.machine()}-unknown-linux-gnu"
    run("cargo", "zigbuild", *wanted, "--target", f"{triple}.{glibc}")
    return target / triple / "release" / "mainstem"


class Program:
    """The program to package, with what is known of it."""

    def __init__(self, binary):
        self.path = Path(binary).resolve()
        self.bytes = self.path.read_bytes()
        self.version = run(self.path, "--version").decode().split()[1]
        found = re.findall(r"GLIBC_(\d+)\.(\d+)", run("readelf", "--version-info", self.path).decode())
        # A static program needs none.
        self.glibc = max(((int(a), int(b)) for a, b in found), default=None)
        self.arch = platform.machine()

    def completions(self):
        """The completions of each shell, by their places under /usr."""
        return {place: run(self.path, "completions", shell) for shell, place in SHELLS.items()}


def common_files():
    """What each package has beside the program, by name."""
    names = ["README.md", "LICENSE", "config/mainstem.toml", "packaging/mainstem.service", "packaging/environment.example"]
    return {Path(name).name: (ROOT / name).read_bytes() for name in names}


def tarball(program, out):
    name = f"mainstem-{program.version}-{program.arch}-linux"
    files = {"mainstem": program.bytes, **common_files(), **program.completions()}
    target = out / f"{name}.tar.gz"
    with (
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=TIME) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path, data in files.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mtime, entry.mode = len(data), TIME, 0o755 if path == "mainstem" else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return target


def wheel(program, out):
    """A wheel whose only script is the program, so that `pip install` puts it on the path."""
    libc = "manylinux_{}_{}".format(*program.glibc) if program.glibc else "musllinux_1_1"
    tag = f"py3-none-{libc}_{program.arch}"
    name = f"mainstem-{program.version}"
    info = f"{name}.dist-info"
    metadata = "\n".join([
        "Metadata-Version: 2.4", "Name: mainstem", f"Version: {program.version}", f"Summary: {SUMMARY}",
        "License-Expression: Apache-2.0", "Requires-Python: >=3.8", "Description-Content-Type: text/markdown", "",
        (ROOT / "README.md").read_text(),
    ])
    head = f"Wheel-Version: 1.0\nGenerator: mainstem\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        f"{name}.data/scripts/mainstem": program.bytes,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": head.encode(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    digest = lambda data: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    lines = [f"{path},sha256={digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    target = out / f"{name}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            # With the type of the file: without, installers ignore the permissions.
            entry.external_attr = (0o100755 if path.endswith("/mainstem") else 0o100644) << 16
            archive.writestr(entry, data)
    return target


def deb(program, out):
    """A Debian package with the service, which is neither enabled nor started: its key has to be set first."""
    machine = run("dpkg", "--print-architecture").decode().strip()
    needed = ["libc6 (>= {}.{})".format(*program.glibc)] if program.glibc else []
    needed += ["libgcc-s1"] * (b"libgcc_s.so.1" in run("readelf", "--dynamic", program.path))
    common = common_files()
    unit = common["mainstem.service"].replace(b"/usr/local/bin/", b"/usr/bin/")
    files = {
        "usr/bin/mainstem": (program.bytes, 0o755),
        "usr/lib/systemd/system/mainstem.service": (unit, 0o644),
        "etc/mainstem/mainstem.toml": (common["mainstem.toml"], 0o644),
        "etc/mainstem/environment": (common["environment.example"], 0o600),
        "usr/share/doc/mainstem/copyright": (common["LICENSE"], 0o644),
        "usr/share/doc/mainstem/README.md": (common["README.md"], 0o644),
        **{f"usr/{place}": (data, 0o644) for place, data in program.completions().items()},
    }
    size = sum(len(data) for data, _ in files.values()) // 1024
    depends = [f"Depends: {', '.join(needed)}"] if needed else []
    control = [
        "Package: mainstem", f"Version: {program.version}", f"Architecture: {machine}",
        "Maintainer: The Mainstem authors <mainstem@localhost>", f"Installed-Size: {size}", *depends,
        "Section: net", "Priority: optional", f"Description: {SUMMARY}",
        " Serves models with the APIs of OpenAI, Anthropic and Ollama. Set a key in",
        " /etc/mainstem/environment before you start the service.", "",
    ]
    kept = [f"/{path}" for path in files if path.startswith("etc/")]
    files["DEBIAN/control"] = ("\n".join(control).encode(), 0o644)
    files["DEBIAN/conffiles"] = ("\n".join([*kept, ""]).encode(), 0o644)
    target = out / f"mainstem_{program.version}_{machine}.deb"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for path, (data, mode) in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(mode)
        os.environ.setdefault("SOURCE_DATE_EPOCH", str(TIME))
        run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", folder, target)
    return target


def add_program_options(parser):
    parser.add_argument("--binary", type=Path, help="a program that is built already")
    parser.add_argument("--glibc", metavar="VERSION", type=glibc_version, help="the oldest glibc to run with, such as 2.28")


def glibc_version(text):
    if re.fullmatch(r"2\.\d+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 2.28")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"tarball": tarball, "wheel": wheel, "deb": deb}
    parser.add_argument("kind", choices=kinds)
    add_program_options(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    zigbuild = options.glibc is not None and options.binary is None
    needed = ["readelf", *["dpkg-deb"] * (options.kind == "deb"), *["cargo-zigbuild"] * zigbuild]
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing:
        sys.exit(f"package.py: {missing[0]} is not installed")
    # The permissions of folders in a package.
    os.umask(0o022)
    options.out.mkdir(parents=True, exist_ok=True)
    program = Program(options.binary or build(options.glibc))
    if options.glibc and program.glibc and program.glibc > tuple(map(int, options.glibc.split("."))):
        sys.exit("package.py: {} needs glibc {}.{}".format(program.path, *program.glibc) + f", not {options.glibc}")
    file = kinds[options.kind](program, options.out.resolve())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(file.name + ".sha256").write_text(f"{digest}  {file.name}\n")
    print(file)


if __name__ == "__main__":
    main()
