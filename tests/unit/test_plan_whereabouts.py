"""Where a machine is: as its environment says, else as its cloud says; and nobody else is asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stoker._diagnostics.machine import MachineRegion, detect_region

NOBODY = "http://127.0.0.1:9"


@contextmanager
def metadata(answers: dict[tuple[str, str], str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve answers by method and path, and note what was asked."""
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            asked.append((self.command, self.path))
            body = answers.get((self.command, self.path))
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        do_GET = do_PUT = _answer  # noqa: N815 - the names that the server looks for

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def vendor(root: Path, name: str) -> Path:
    file = root / "sys/class/dmi/id/sys_vendor"
    file.parent.mkdir(parents=True)
    file.write_text(f"{name}\n")
    return root


def test_functions_and_containers_say_it_themselves(tmp_path: Path) -> None:
    said = {"AWS_REGION": "eu-west-1", "AWS_LAMBDA_FUNCTION_NAME": "f"}
    assert detect_region(said, tmp_path) == MachineRegion(region="eu-west-1", source="AWS_REGION")


def test_a_configured_region_is_not_taken_for_the_machine_s(tmp_path: Path) -> None:
    assert detect_region({"AWS_REGION": "eu-west-1"}, tmp_path) == MachineRegion()


def test_a_machine_outside_clouds_sends_no_metadata_request(tmp_path: Path) -> None:
    with metadata({}) as (url, asked):
        assert detect_region({}, vendor(tmp_path, "QEMU"), url, url) == MachineRegion()
    assert asked == []


def test_ec2_is_asked_with_a_token(tmp_path: Path) -> None:
    answers = {("PUT", "/latest/api/token"): "t", ("GET", "/latest/meta-data/placement/region"): "us-west-2"}
    with metadata(answers) as (url, asked):
        assert detect_region({}, vendor(tmp_path, "Amazon EC2"), url, NOBODY).region == "us-west-2"
    assert asked == list(answers)


def test_ec2_is_not_asked_where_that_is_switched_off(tmp_path: Path) -> None:
    with metadata({}) as (url, asked):
        assert (
            detect_region({"AWS_EC2_METADATA_DISABLED": "true"}, vendor(tmp_path, "Amazon EC2"), url) == MachineRegion()
        )
    assert asked == []


def test_google_names_a_zone_of_the_region(tmp_path: Path) -> None:
    answers = {("GET", "/computeMetadata/v1/instance/zone"): "projects/123/zones/europe-west4-b"}
    with metadata(answers) as (url, _):
        assert detect_region({}, vendor(tmp_path, "Google"), NOBODY, url).region == "europe-west4"


@pytest.mark.parametrize("answers", [{}, {("PUT", "/latest/api/token"): "t\r\nHost: x"}])
def test_malformed_metadata_answers_are_ignored(tmp_path: Path, answers: dict[tuple[str, str], str]) -> None:
    with metadata(answers) as (url, _):
        assert detect_region({}, vendor(tmp_path, "Amazon EC2"), url) == MachineRegion()


def test_a_service_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    assert detect_region({}, vendor(tmp_path, "Amazon EC2"), NOBODY) == MachineRegion()


def test_metadata_answers_without_http_are_ignored(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert detect_region({}, vendor(tmp_path, "Amazon EC2"), url) == MachineRegion()
        thread.join()
