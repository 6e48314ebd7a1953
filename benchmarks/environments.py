"""Environments of the benchmark's peers: `python -m benchmarks.environments [PEER ...]` creates the missing ones.

Every peer has a virtual environment of its own under `benchmarks/results/envs`, so that none dictates versions to
another or to stoker. It holds the torch of this environment and exactly the packages of the peer's
`requirements.txt`, which lists all that it imports; they are installed without their declared dependencies, some of
which (torchvision, the SDKs of other clouds) nothing here uses.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ["ENVIRONMENTS", "PEERS", "program", "python_of"]

_FOLDER = Path(__file__).resolve().parent
ENVIRONMENTS = _FOLDER / "results" / "envs"
PEERS = tuple(sorted(path.parent.name for path in (_FOLDER / "peers").glob("*/requirements.txt")))


def program(peer: str) -> Path:
    """Return the program of a peer, which its own interpreter runs."""
    return _FOLDER / "peers" / peer / "run.py"


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which is created first if it is missing or out of date.

    Raises:
        KeyError: there is no such peer.
        subprocess.CalledProcessError: a package could not be installed; pip says why on standard error.
    """
    if peer not in PEERS:
        raise KeyError(f"no peer {peer!r}; there are {', '.join(PEERS)}")
    requirements = program(peer).with_name("requirements.txt")
    torch = f"torch=={version('torch')}"  # a local version, such as +cpu, included
    wanted = hashlib.sha256(f"{sys.version}\n{torch}\n".encode() + requirements.read_bytes()).hexdigest()
    folder = ENVIRONMENTS / peer
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    if not (stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        _install(python, torch)
        _install(python, "--no-deps", "--requirement", str(requirements))
        stamp.write_text(wanted)
    return python


def _install(python: Path, *arguments: str) -> None:
    """Install with this environment's pip; its output goes to standard error, since standard output has the results."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    for name in sys.argv[1:] or PEERS:
        print(f"{name}: {python_of(name)}")
