"""The memory of a process that packs and permutes several times more than it may hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MEMORY_MIB, SOURCE_MIB = 64, 320
_PROGRAM = """
import resource, sys
import numpy as np
import stoker

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)

url, memory, samples = sys.argv[1], sys.argv[2], int(sys.argv[3])
settings = {"schema": {"x": stoker.Bytes(), "n": stoker.Array("int64")}, "super_sample_bytes": 1 << 20}
value = np.random.default_rng(0).bytes(16384)

def pack(url, samples, **more):
    with stoker.Packer(url, **settings, **more) as packer:
        for n in range(samples):
            packer.write({"x": value[n % 100:], "n": n})

pack(url + "/plain", 2000)  # what a pack takes that does not permute
before = peak_mib()
pack(url + "/permuted", samples, shuffle=7, memory=memory)
print(peak_mib() - before)
numbers = [int(sample["n"]) for sample in stoker.Dataset(url + "/permuted", columns=["n"])]
assert sorted(numbers) == list(range(samples)) != numbers
"""


def test_permuting_takes_no_more_memory_than_it_is_given(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path), f"{MEMORY_MIB}MiB", str(SOURCE_MIB * 64)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= MEMORY_MIB
