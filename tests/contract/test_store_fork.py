"""A forked child and its parent, in a process of their own: what else the test run holds must not keep things alive."""

from __future__ import annotations

import os
import subprocess
import sys

from stoker_local import LocalBucket

PROGRAM = """
import asyncio, gc, os, sys
from stoker import S3Options, open_store

async def read():
    async with asyncio.timeout(60):
        return (await store.get("x"))[0]

key = {"access_key_id": "stoker", "secret_access_key": "stoker-secret"}
store = open_store("s3://stoker/fork", options=S3Options(endpoint_url=sys.argv[1], region="us-east-1", **key))
with asyncio.Runner() as runner:
    runner.run(store.put("x", b"1"))
    runner.run(read())
    if (child := os.fork()) == 0:
        status = 1
        try:
            asyncio.run(read())
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child could not read"
    assert runner.run(read()) == b"1", "the parent could not read"
    runner.run(store.close())
"""


def test_what_a_forked_child_drops_does_not_reach_into_its_parents_event_loop(
    local_bucket: LocalBucket,
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, local_bucket.url]
    subprocess.run(command, check=True, env=environment, timeout=300)
