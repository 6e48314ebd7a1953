"""A stream data set under torch.distributed (gloo), in a process a rank with worker processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import stoker

SAMPLES = 101
_TIMEOUT_SECONDS = 300  # of a hang

PROGRAM = """
import json, os, sys
from datetime import timedelta
from torch import distributed
from torch.utils.data import DataLoader
from stoker.errors import RankMismatchError
from stoker_torch import StreamDataset

url, rendezvous, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
distributed.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
loader = DataLoader(StreamDataset(url, seed=5), batch_size=8, num_workers=2, multiprocessing_context="fork")
report = {"epochs": [[batch["x"].tolist() for batch in loader] for _ in range(2)]}
alone = StreamDataset(url, rank=0, world_size=1) if rank == 0 else None  # not collective
report["alone"] = 0 if alone is None else len(alone)
try:
    StreamDataset(url, seed=rank)
except RankMismatchError as error:
    report["mismatch"] = str(error)
print(json.dumps(report))
distributed.destroy_process_group()
"""


def run_ranks(url: str, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, url, str(folder / "rendezvous")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(output) for output in outputs]


def test_ranks_find_themselves_share_each_epoch_and_compare_what_they_were_given(tmp_path: Path) -> None:
    url = str(tmp_path / "train")
    with stoker.Packer(url, schema={"x": stoker.Array("int64")}, super_sample_bytes=100) as packer:
        packer.extend({"x": index} for index in range(SAMPLES))
    reports = run_ranks(url, tmp_path)
    for epoch in range(2):
        batches = [report["epochs"][epoch] for report in reports]
        assert len({tuple(map(len, each)) for each in batches}) == 1
        every = [number for each in batches for batch in each for number in batch]
        assert (len(every), set(every)) == (SAMPLES + 1, set(range(SAMPLES)))
    assert reports[0]["epochs"][0] != reports[0]["epochs"][1]
    assert reports[0]["alone"] == SAMPLES
    for rank, report in enumerate(reports):
        assert f"seed (here {rank})" in report["mismatch"]
