"""A web server of files in a tier server's place, for reads: nginx over the folder that a server has filled."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker._shared.folder_storage import FolderStorage
from stoker.errors import CredentialsError
from support.ports import reserved_port
from support.shared_tier import IS_SOUND, OTHER_SECRET, SECRET, client_of, object_of, offered, read, running, server_of
from support.waiting import until_async

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed; install it to run this test")


@contextmanager
def nginx(folder: Path, tier: Path) -> Iterator[str]:
    """Run nginx with the configuration of the page, and yield its URL."""
    port = reserved_port()
    (text,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for placeholder, value in (
        ("listen 10.0.0.9:7412 ssl;", f"listen 127.0.0.1:{port};"),
        ("ssl_certificate     /etc/tier/certificate.pem;", ""),
        ("ssl_certificate_key /etc/tier/key.pem;", ""),
        ("/mnt/nvme/tier/TENANT", str(tier / SECRET.tenant)),
        ("TOKEN", SECRET.token),
    ):
        assert placeholder in text, placeholder
        text = text.replace(placeholder, value)
    paths = "".join(
        f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    head = f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
    config.write_text(f"{head} http {{ access_log off; {paths} {text} }}")
    process = subprocess.Popen([str(NGINX), "-c", str(config), "-e", str(folder / "error.log")])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_a_trainer_reads_from_nginx_what_a_tier_server_has_left_on_disk(tmp_path: Path) -> None:
    objects = [object_of(number, 300_000) for number in range(5)]
    tier = tmp_path / "tier"
    (tmp_path / "nginx").mkdir()

    async def fill() -> None:
        folder = FolderStorage(tier, 1 << 30, IS_SOUND)
        async with running(server_of(1, folder=folder)) as url, client_of(url) as client:
            for ref, data in objects:
                await offered(client, ref, data)

    async def reads(url: str) -> None:
        async with client_of(url) as client, client_of(url, secret=OTHER_SECRET) as other:
            await until_async(lambda: answers(client))
            for ref, data in objects:
                assert await read(client, ref) == data
            assert await read(client, object_of(99)[0]) is None
            with pytest.raises(CredentialsError):
                await read(other, objects[0][0])
            client.offer(object_of(98)[0], memoryview(object_of(98)[1]))  # which it does not take

    async def answers(client: object) -> bool:
        try:
            return await read(client, objects[0][0]) is not None  # type: ignore[arg-type]
        except OSError:
            return False

    asyncio.run(fill())
    for folder in (tmp_path, tier, tier / SECRET.tenant, tier / SECRET.tenant / "objects"):
        folder.chmod(0o755)  # a worker of nginx is another user
    with nginx(tmp_path / "nginx", tier) as url:
        asyncio.run(reads(url))
