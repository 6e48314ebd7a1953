"""Coverage-guided runs of every reader of bytes from anywhere, by atheris (libFuzzer).

``python -m fuzz`` attacks all of them, one process each; ``python -m fuzz READER`` one; and
``python -m fuzz READER FILE`` reads one input again, without atheris. What is asked of a reader, and how inputs are
mutated, is that of the test suite.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from support.fuzzed.registry import READERS

FOLDER = Path(".fuzz")
FIRST = re.compile(r"INITED\s+cov: (\d+) ft: (\d+)")
LAST = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)")


def corpus_of(name: str) -> Path:
    """Return the folder of a reader's corpus, with valid inputs made by stoker's own writers in it."""
    folder = FOLDER / "corpus" / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(READERS[name].seeds()):
        (folder / f"seed-{number}").write_bytes(seed)
    return folder


def attack(name: str, seconds: int, seed: int) -> bool:
    """Run one reader under libFuzzer in a process of its own, print its figures, and return whether it held."""
    crashes, log = FOLDER / "crashes", FOLDER / f"{name.replace(' ', '-')}.log"
    crashes.mkdir(parents=True, exist_ok=True)
    options = {
        "max_total_time": seconds,
        "seed": seed,
        "timeout": 60,  # seconds for one input, on a machine that others use too
        "rss_limit_mb": 2048,
        "max_len": 1 << 16,
        "artifact_prefix": f"{crashes}/{name.replace(' ', '-')}-",
    }
    command = [sys.executable, "-m", "fuzz.target", name, str(corpus_of(name))]
    started = time.monotonic()
    with log.open("wb") as output:
        ended = subprocess.run(
            [*command, *(f"-{option}={value}" for option, value in options.items())], stderr=output, stdout=output
        )
    spent = time.monotonic() - started
    said = log.read_text(errors="replace")
    first, last = FIRST.search(said), LAST.search(said)
    if ended.returncode or first is None or last is None:
        print(f"{name}: FAILED, see {log} and {crashes}/", flush=True)
        return False
    runs, coverage, features, corpus = map(int, last.groups())
    print(
        f"| {name} | {spent:.0f} | {runs:,} | {first[1]} → {coverage} | {first[2]} → {features} | {corpus} |",
        flush=True,
    )
    return True


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("reader", nargs="?", choices=READERS, help="default: all")
    parser.add_argument("file", nargs="?", type=Path, help="an input to read again")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader, default 60")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer, default 1")
    options = parser.parse_args()
    if options.file is not None:
        print(READERS[options.reader].outcome(options.file.read_bytes()))
        return 0
    print("| reader | seconds | executions | coverage | features | corpus |\n|---|--:|--:|--:|--:|--:|", flush=True)
    held = [attack(name, options.seconds, options.seed) for name in ([options.reader] if options.reader else READERS)]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
