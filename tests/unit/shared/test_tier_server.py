"""A tier server, as seen by an HTTP client: answers, errors, and forbidden operations."""

from __future__ import annotations

import asyncio
import errno
import gzip
import mmap
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stoker._shared import address, serving
from stoker._shared import server as tier_server
from stoker._shared.address import Address
from stoker._shared.certificate import create_ephemeral_tls
from stoker._shared.folder_storage import FolderStorage
from stoker._shared.serving import ListenAddress
from stoker.errors import ConfigError
from support.shared_tier import IS_SOUND, OTHER_SECRET, SECRET, client_of, object_of, read, running, server_of
from support.waiting import until, until_async

REF, DATA = object_of(1)
NAME = SECRET.object_name(REF)
TOKEN = {"Authorization": f"Bearer {SECRET.token}"}
Ask = Callable[..., Awaitable[tuple[int, bytes, Any]]]


def asking(main: Callable[[Ask, Any], Awaitable[None]], **settings: Any) -> None:
    """Run a test with something that sends requests to a server, and the server."""

    async def run() -> None:
        server = server_of(**settings)
        async with running(server) as url, aiohttp.ClientSession() as session:

            async def ask(method: str, path: str, **given: Any) -> tuple[int, bytes, Any]:
                async with session.request(method, url + path, **{"headers": TOKEN, **given}) as response:
                    return response.status, await response.read(), response.headers

            await main(ask, server)

    asyncio.run(run())


def test_an_object_that_was_put_is_read_whole_and_in_ranges() -> None:
    async def main(ask: Ask, server: Any) -> None:
        path = f"/objects/{NAME}"
        assert (await ask("GET", path))[0] == 404
        assert (await ask("PUT", path, data=DATA))[0] == 201
        assert (await ask("PUT", path, data=DATA))[0] == 200
        assert (await ask("GET", path))[:2] == (200, DATA)
        status, body, headers = await ask("GET", path, headers=TOKEN | {"Range": "bytes=10-19"})
        assert (status, body, headers["Content-Range"]) == (206, DATA[10:20], f"bytes 10-19/{len(DATA)}")
        assert (await ask("GET", path, headers=TOKEN | {"Range": "bytes=9990-"}))[1] == DATA[9990:]
        assert (await ask("GET", path, headers=TOKEN | {"Range": "bytes=-5"}))[1] == DATA[-5:]
        status, body, headers = await ask("HEAD", path)
        assert (status, body, headers["Content-Length"]) == (200, b"", str(len(DATA)))
        for beyond in ("bytes=10000-", "bytes=5-3", "lines=1-2", "bytes=0-1,4-5"):
            assert (await ask("GET", path, headers=TOKEN | {"Range": beyond}))[0] == 416, beyond
        assert (await ask("DELETE", path))[0] == 204
        assert (await ask("GET", path))[0] == 404

    asking(main)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {SECRET.token}"},
        {"Authorization": f"Bearer {SECRET.token[:-1]}"},
        {"Authorization": f"Bearer {SECRET.metrics_token}"},
        {"Authorization": f"Bearer {OTHER_SECRET.token}"},
        {"Authorization": "Bearer " + "é" * 32},
    ],
)
def test_without_a_valid_token_nothing_is_answered(headers: dict[str, str]) -> None:
    async def main(ask: Ask, server: Any) -> None:
        await ask("PUT", f"/objects/{NAME}", data=DATA)
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            status, body, _ = await ask(method, f"/objects/{NAME}", headers=headers)
            assert status == 401
            assert DATA not in body
        assert (await ask("GET", "/metrics", headers=headers))[0] == (
            200 if SECRET.metrics_token in headers.get("Authorization", "") else 401
        )
        assert server.stats.unauthorized >= 4
        assert (await ask("GET", f"/objects/{NAME}"))[0] == 200

    asking(main)


def test_bytes_under_a_wrong_name_are_refused_and_not_stored() -> None:
    async def main(ask: Ask, server: Any) -> None:
        path = f"/objects/{NAME}"
        forged = bytearray(DATA)
        forged[5] ^= 1
        assert (await ask("PUT", path, data=bytes(forged)))[0] == 422
        assert (await ask("GET", path))[0] == 404
        assert (await ask("PUT", path, data=DATA[:-1], headers=TOKEN | {"Expect": "100-continue"}))[0] == 422
        assert (server.stats.refused, server.stats.received_bytes) == (2, len(DATA)), "a length tells enough"
        assert (await ask("PUT", path, data=DATA))[0] == 201

    asking(main)


def test_a_tenant_neither_reads_nor_deletes_what_is_another_s_by_its_name() -> None:
    async def main(ask: Ask, server: Any) -> None:
        path, other = f"/objects/{NAME}", {"Authorization": f"Bearer {OTHER_SECRET.token}"}
        await ask("PUT", path, data=DATA)
        assert (await ask("GET", path, headers=other))[0] == 404
        assert (await ask("DELETE", path, headers=other))[0] == 204
        assert (await ask("PUT", path, headers=other, data=DATA))[0] == 422, "it is not the other's name of the bytes"
        assert (await ask("GET", path))[:2] == (200, DATA)

    asking(main, secrets=(SECRET, OTHER_SECRET))


@pytest.mark.parametrize(
    "path",
    [
        "/objects/",
        "/objects/short",
        f"/objects/{NAME.upper()}",
        "/objects/..%2f..%2fetc%2fpasswd",
        f"/objects/{NAME}/x",
        "/",
    ],
)
def test_what_is_no_object_is_not_found(path: str) -> None:
    async def main(ask: Ask, server: Any) -> None:
        assert (await ask("GET", path))[0] == 404
        assert (await ask("PUT", path, data=DATA))[0] in (404, 405)

    asking(main)


def test_an_offer_without_a_length_or_beyond_any_super_sample_is_refused_before_its_body() -> None:
    async def main(ask: Ask, server: Any) -> None:
        async def chunks() -> Any:
            yield DATA

        assert (await ask("PUT", f"/objects/{NAME}", data=chunks()))[0] == 411
        expecting = TOKEN | {"Expect": "100-continue", "Content-Length": str(1 << 40)}
        assert (await ask("PUT", f"/objects/{NAME}", headers=expecting))[0] == 413
        assert server.stats.received_bytes == 0

    asking(main)


def test_bytes_are_taken_as_they_are_whatever_encoding_a_request_claims(caplog: pytest.LogCaptureFixture) -> None:
    async def main(ask: Ask, server: Any) -> None:
        claiming = TOKEN | {"Content-Encoding": "gzip"}
        bomb = gzip.compress(bytes(10_000_000))
        assert (await ask("PUT", f"/objects/{NAME}", headers=claiming, data=bomb))[0] == 422
        assert (await ask("PUT", f"/objects/{NAME}", headers=claiming, data=DATA))[0] == 201
        assert (await ask("GET", f"/objects/{NAME}"))[:2] == (200, DATA)

    asking(main)
    assert not caplog.records


def test_what_is_here_is_not_received_again() -> None:
    async def main(ask: Ask, server: Any) -> None:
        expecting = TOKEN | {"Expect": "100-continue"}
        assert (await ask("PUT", f"/objects/{NAME}", data=DATA, headers=expecting))[0] == 201
        assert (await ask("PUT", f"/objects/{NAME}", data=DATA, headers=expecting))[0] == 200
        assert server.stats.received_bytes == len(DATA)

    asking(main)


def test_a_full_server_declines_and_continues() -> None:
    async def main(ask: Ask, server: Any) -> None:
        other, data = object_of(2)
        await ask("PUT", f"/objects/{NAME}", data=DATA)
        assert (await ask("PUT", f"/objects/{SECRET.object_name(other)}", data=data))[0] == 507
        assert (await ask("GET", f"/objects/{NAME}"))[:2] == (200, DATA)

    asking(main, limit_bytes=15_000)


def test_a_machine_that_has_no_memory_left_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    large, data = object_of(2, 2_000_000)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async def main(ask: Ask, server: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(mmap, "mmap", refuse)
            assert (await ask("PUT", f"/objects/{SECRET.object_name(large)}", data=BytesIO(data)))[0] == 507
        assert server.statistics()["memory"].used_bytes == 0

    asking(main, limit_bytes=1 << 22)


def test_an_upload_that_breaks_off_gives_its_room_back() -> None:
    async def main(ask: Ask, server: Any) -> None:
        async def broken() -> Any:
            yield DATA[:5000]
            raise RuntimeError("gone")

        headers = TOKEN | {"Content-Length": str(len(DATA))}
        with pytest.raises((aiohttp.ClientError, RuntimeError)):
            await ask("PUT", f"/objects/{NAME}", data=broken(), headers=headers)

        async def is_taken() -> bool:
            return (await ask("PUT", f"/objects/{NAME}", data=DATA))[0] == 201

        await until_async(is_taken)

    asking(main, limit_bytes=15_000)


def test_an_object_that_is_being_received_is_not_forgotten_meanwhile() -> None:
    async def main(ask: Ask, server: Any) -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            yield DATA[:5000]
            begun.set()
            await go.wait()
            yield DATA[5000:]

        path = f"/objects/{NAME}"
        offer = asyncio.ensure_future(ask("PUT", path, data=slow(), headers=TOKEN | {"Content-Length": str(len(DATA))}))
        await begun.wait()
        await until(lambda: server.statistics()["memory"].used_bytes)
        assert (await ask("DELETE", path))[0] == 204
        assert server.statistics()["memory"].used_bytes == len(DATA), "its memory is taken all the same"
        go.set()
        assert (await offer)[0] == 201
        assert (await ask("GET", path))[:2] == (200, DATA)
        assert (await ask("DELETE", path))[0] == 204
        assert server.statistics()["memory"].used_bytes == 0

    asking(main)


def test_metrics_have_the_prometheus_format_and_health_needs_no_token() -> None:
    async def main(ask: Ask, server: Any) -> None:
        await ask("PUT", f"/objects/{NAME}", data=DATA)
        await ask("GET", f"/objects/{NAME}")
        status, body, _ = await ask("GET", "/metrics", headers={"Authorization": f"Bearer {SECRET.metrics_token}"})
        lines = body.decode().splitlines()
        assert status == 200
        assert 'stoker_tier_place_used_bytes{place="memory"} 10000' in lines
        assert "stoker_tier_sent_bytes_total 10000" in lines
        assert all(line.startswith(("# TYPE ", "stoker_tier_")) for line in lines)
        assert (await ask("GET", "/health", headers={}))[:2] == (200, b"ok\n")

    asking(main)


def test_what_has_no_room_in_memory_is_kept_on_disk_and_read_again_by_the_next_server(tmp_path: Path) -> None:
    objects = {SECRET.object_name(ref): data for ref, data in map(object_of, range(4))}

    async def fill(ask: Ask, server: Any) -> None:
        for name, data in objects.items():
            assert (await ask("PUT", f"/objects/{name}", data=data))[0] == 201
        for name, data in objects.items():
            assert (await ask("GET", f"/objects/{name}"))[:2] == (200, data)
            assert (await ask("GET", f"/objects/{name}", headers=TOKEN | {"Range": "bytes=7-8"}))[1] == data[7:9]

    asking(fill, limit_bytes=15_000, folder=FolderStorage(tmp_path, 100_000, IS_SOUND))
    files = sorted(tmp_path.glob("*/objects/*"))
    assert len(files) == 3
    spoilt = files[0].name
    files[0].write_bytes(bytes(len(DATA)))

    async def read(ask: Ask, server: Any) -> None:
        for file in files:
            status, body, _ = await ask("GET", f"/objects/{file.name}")
            assert (status, body) == ((404, body) if file.name == spoilt else (200, objects[file.name]))
        assert not files[0].exists()

    asking(read, folder=FolderStorage(tmp_path, 100_000, IS_SOUND))


def test_a_connection_without_a_token_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_AUTHENTICATION_SECONDS", 0.05)

    async def main() -> None:
        async with running(server_of()) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /objects/")
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_silent_unauthenticated_peers_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MAX_UNAUTHENTICATED", 4)

    async def main() -> None:
        async with running(server_of()) as url, aiohttp.ClientSession() as session:
            place = url.removeprefix("http://").split(":")
            strangers = [socket.create_connection((place[0], int(place[1]))) for _ in range(20)]
            for _ in range(3):
                async with session.get(f"{url}/objects/{NAME}", headers=TOKEN) as response:
                    assert response.status == 404
            for each in strangers:
                each.close()

    asyncio.run(main())


def test_peers_in_a_slow_tls_handshake_count_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MAX_UNAUTHENTICATED", 4)

    async def main() -> None:
        endpoint = ListenAddress(address=Address("127.0.0.1", 0), tls=create_ephemeral_tls())
        async with running(server_of(), endpoint) as url, client_of(url) as tier:
            host, port = url.removeprefix("https://").partition("?")[0].split(":")
            strangers = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
            async with asyncio.timeout(2):  # sooner than a handshake may take
                for reader, _ in strangers[:16]:
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
            assert await read(tier, REF) is None
            for _, writer in strangers:
                writer.close()

    asyncio.run(main())


def test_a_connection_that_makes_way_within_its_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MAX_UNAUTHENTICATED", 1)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    async def main() -> None:
        endpoint = ListenAddress(address=Address("127.0.0.1", 0), tls=create_ephemeral_tls())
        async with running(server_of(), endpoint) as url:
            host, port = url.removeprefix("https://").partition("?")[0].split(":")

            async def end() -> None:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
                    with closing(writer):
                        await reader.read()

            async with asyncio.timeout(5), asyncio.TaskGroup() as group:
                ends = [group.create_task(end()) for _ in range(10)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION, timeout=4)
                assert sum(each.done() for each in ends) >= 9, "all but the last"
                for each in ends:
                    each.cancel()

    asyncio.run(main())


MALFORMED = [
    b"\x16\x03\x01\x02 TLS where there is none\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"A" * 100_000,
    b"GET / HTTP/1.1\r\nAuthorization: Bearer " + SECRET.token.encode() + b"\x00\r\n\r\n",
]


@pytest.mark.parametrize("sent", MALFORMED)
def test_a_request_that_is_not_http_gets_an_error_and_is_not_logged(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(server_of()) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(30):
                assert b" 400 " in await reader.readline()
            writer.close()

    asyncio.run(main())
    assert not caplog.records


def test_an_upload_that_ends_early_is_neither_stored_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = server_of()
        async with running(server) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"PUT /objects/{NAME} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {SECRET.token}\r\n"
            writer.write(f"{head}Content-Length: {len(DATA)}\r\n\r\n".encode() + DATA[:100])
            writer.write_eof()
            async with asyncio.timeout(30):
                assert b" 201 " not in await reader.readline()
            writer.close()
            await until(lambda: server.statistics()["memory"].objects == 0)

    asyncio.run(main())
    assert not caplog.records


def test_off_loopback_a_server_shows_a_certificate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "is_loopback", lambda _: False)

    async def main() -> None:
        async with running(server_of()) as url:
            assert url.startswith("https://127.0.0.1:")
            assert len(url.partition("?fingerprint=")[2]) == 64

    asyncio.run(main())


def test_a_server_that_listens_everywhere_must_say_where_it_is() -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        ListenAddress(address=Address("0.0.0.0", 0))  # noqa: S104 - what is refused
    everywhere = ListenAddress(address=Address("0.0.0.0", 0), advertised="tier.internal", tls=None)  # noqa: S104 - see above
    assert everywhere.url(7412, None) == "http://tier.internal:7412"


def test_two_certificates_are_two() -> None:
    assert create_ephemeral_tls().fingerprint != create_ephemeral_tls().fingerprint


def test_a_full_server_refuses_before_the_body_is_sent() -> None:
    async def main() -> None:
        async with running(server_of(100)) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"PUT /objects/{NAME} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {SECRET.token}\r\n"
            writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {len(DATA)}\r\n\r\n".encode())
            async with asyncio.timeout(10):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 507 ")
            writer.close()

    asyncio.run(main())


def test_slow_uploads_keep_no_others_from_the_disk(tmp_path: Path) -> None:
    async def main(ask: Ask, server: Any) -> None:
        go = asyncio.Event()

        async def slow() -> Any:
            yield DATA[:5000]
            await go.wait()
            yield DATA[5000:]

        objects = {SECRET.object_name(ref): data for ref, data in map(object_of, range(2, 8))}
        headers = TOKEN | {"Content-Length": str(len(DATA))}
        offers = [
            asyncio.ensure_future(ask("PUT", f"/objects/{each}", data=slow(), headers=headers)) for each in objects
        ]
        await until(lambda: server.statistics()["disk"].objects == len(offers))
        async with asyncio.timeout(10):
            assert (await ask("PUT", f"/objects/{NAME}", data=DATA))[0] == 201
        go.set()
        await asyncio.gather(*offers)

    asking(main, limit_bytes=100, folder=FolderStorage(tmp_path, 1 << 20, IS_SOUND))


def test_what_is_sent_from_disk_is_counted(tmp_path: Path) -> None:
    async def main(ask: Ask, server: Any) -> None:
        path = f"/objects/{NAME}"
        assert (await ask("PUT", path, data=DATA))[0] == 201
        assert (await ask("HEAD", path))[0] == 200
        assert server.stats.sent_bytes == 0
        assert (await ask("GET", path, headers=TOKEN | {"Range": "bytes=10-19"}))[1] == DATA[10:20]
        await until(lambda: server.stats.sent_bytes == 10)
        assert (await ask("GET", path, headers=TOKEN | {"Range": "bytes=99999-"}))[0] == 416
        assert (await ask("GET", path))[1] == DATA
        await until(lambda: server.stats.sent_bytes == 10 + len(DATA))

    asking(main, limit_bytes=100, folder=FolderStorage(tmp_path, 1 << 20, IS_SOUND))


def test_a_reader_that_stands_still_is_left_also_where_the_object_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_server, "_TRANSFER_SECONDS", 0.2)
    monkeypatch.setattr(tier_server, "_MIN_BYTES_PER_SECOND", 1 << 30)
    large, data = object_of(2, 20_000_000)

    async def main() -> None:
        server = server_of(100, folder=FolderStorage(tmp_path, 1 << 26, IS_SOUND))
        async with running(server) as url, aiohttp.ClientSession() as session:
            name = SECRET.object_name(large)
            async with session.put(f"{url}/objects/{name}", headers=TOKEN, data=BytesIO(data)) as response:
                assert response.status == 201
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"GET /objects/{name} HTTP/1.1\r\nHost: a\r\nAuthorization: {TOKEN['Authorization']}\r\n\r\n".encode()
            )
            await asyncio.sleep(1.0)
            received = 0
            with suppress(ConnectionError):
                while chunk := await reader.read(1 << 20):
                    received += len(chunk)
            assert received < len(data)
            writer.close()

    asyncio.run(main())
