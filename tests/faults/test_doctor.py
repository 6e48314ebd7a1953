"""``stoker doctor`` finds problems of a bucket, the network and the machine, and prints no secret."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import S3Options, ServedOptions
from stoker._base.machine import Machine
from stoker._diagnostics.doctor import DoctorConfig, diagnose
from stoker._diagnostics.machine import Finding, Level, MachineRegion, machine_findings
from stoker._diagnostics.probe import ProbeLimits
from stoker._stores.access_token import Grant
from stoker.cli import main
from stoker_functions.serve import TokenKeys
from stoker_local import (
    BucketConfig,
    BucketSpec,
    FaultKind,
    FaultPlan,
    KeyPair,
    LocalBucket,
    NetworkShape,
    running_bucket,
    running_gcs,
)
from stoker_local._s3.model import S3Error
from support.serving_host import running_service

GOOD = Machine(memory_bytes=8 << 30, free_bytes=4 << 30, limited_by="", cores=4, open_files=4096, max_open_files=4096)
QUICK = ProbeLimits(requests=40, size_bytes=2 << 20, seconds=100.0, first_bytes=4)
URL = "s3://stoker/data"
KEYS = KeyPair(access_key="MARKER-key", secret_key="MARKER-secret")


def pack(url: str, *, samples: int = 200, super_sample_bytes: int = 2 << 20) -> None:
    rng = np.random.default_rng(0)
    schema = {"data": stoker.Array("uint8", (16, 1024))}
    with stoker.Packer(url, schema=schema, super_sample_bytes=super_sample_bytes) as packer:
        packer.extend({"data": rng.integers(0, 256, (16, 1024), dtype=np.uint8)} for _ in range(samples))


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, config: BucketConfig | None = None) -> Iterator[LocalBucket]:
    with running_bucket(config or BucketConfig(keys=(KEYS,))) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def found(url: str = URL, *, is_shaped: bool = False, **changes: Any) -> dict[str, Finding]:
    """Return the findings that are not as they should be, by what was looked at, having looked for secrets.

    The speed of an unshaped bucket depends only on the other load of this machine.
    """

    async def look() -> list[Finding]:
        what = DoctorConfig(url=url, limits=QUICK, machine=lambda: GOOD, whereabouts=MachineRegion)
        findings: list[Finding] = []
        await diagnose(replace(what, **changes), findings.append)
        return findings

    findings = asyncio.run(look())
    assert "MARKER" not in repr(findings)
    amiss = {each.check: each for each in findings if each.level not in (Level.OK, Level.NOTE)}
    return {check: finding for check, finding in amiss.items() if is_shaped or check not in ("latency", "bandwidth")}


def levels(findings: Mapping[str, Finding]) -> dict[str, str]:
    """The level of each finding, but that of a bucket that answers late: a busy machine makes it so, too."""
    is_late = "throttling" in findings and "delays the others" in findings["throttling"].text
    return {check: str(each.level) for check, each in findings.items() if check != "throttling" or not is_late}


def test_where_all_is_well_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        assert found(write=True) == {}
        assert not [key for key in running.objects["stoker"] if "doctor" in key]


def test_a_bucket_that_may_not_be_read_is_a_problem_and_names_the_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.service.keys[KEYS.access_key] = replace(KEYS, buckets=("other",))
        problem = found()["read"]
    assert problem.level is Level.PROBLEM
    assert "s3:GetObject" in problem.advice


def test_read_only_access_is_fine_unless_writing_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.service.keys[KEYS.access_key] = replace(KEYS, read_only=True)
        assert found() == {}
        assert levels(found(write=True)) == {"write": "problem"}


def test_training_needs_no_permission_to_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        perform = running.service.perform

        def refuse_listing(call: Any) -> Any:
            if call.operation == "ListObjectsV2":
                return S3Error("AccessDenied", "Access Denied").response("/")
            return perform(call)

        monkeypatch.setattr(running.service, "perform", refuse_listing)
        assert found() == {}


@pytest.mark.parametrize(
    ("skew", "level"),
    [
        (0.0, None),
        (50.0, None),
        (-50.0, None),
        (70.0, "warning"),
        (-300.0, "warning"),
        (1000.0, "problem"),
        (-86400.0, "problem"),
    ],
)
def test_a_wrong_clock_is_reported_before_it_breaks_signatures(
    monkeypatch: pytest.MonkeyPatch, skew: float, level: str | None
) -> None:
    with bucket(monkeypatch):
        pack(URL)
        assert levels(found(clock=lambda: time.time() + skew)) == ({"clock": level} if level else {})


def test_a_bucket_elsewhere_is_a_problem_that_names_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BucketConfig(keys=(KEYS,), buckets=(BucketSpec(name="stoker", region="eu-west-3"),))
    with bucket(monkeypatch, config):
        findings = found()
    assert levels(findings) == {"region": "problem", "read": "problem"}
    assert findings["region"].command == "export AWS_REGION=eu-west-3"


def test_a_machine_elsewhere_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch):
        pack(URL)
        there = MachineRegion(region="eu-west-1", source="EC2's metadata")
        findings = found(whereabouts=lambda: there)
        same = found(whereabouts=lambda: MachineRegion(region="us-east-1", source="AWS_REGION"))
    assert levels(findings) == {"region": "warning"}
    assert "eu-west-1" in findings["region"].text
    assert same == {}


def test_a_slow_and_distant_bucket_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.reshape(NetworkShape(first_byte_seconds=0.2, total_bytes_per_second=4e6))
        telling = replace(QUICK, size_bytes=8 << 20, seconds=60.0)  # enough to see that connections share the link
        assert levels(found(is_shaped=True, limits=telling)) == {"latency": "warning", "bandwidth": "warning"}


def test_no_bandwidth_is_reported_that_a_bucket_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.reshape(NetworkShape(first_byte_seconds=0.02, total_bytes_per_second=50e6))

        async def look() -> list[Finding]:
            limits = ProbeLimits(size_bytes=32 << 20)
            what = DoctorConfig(url=URL, limits=limits, machine=lambda: GOOD, whereabouts=MachineRegion)
            findings: list[Finding] = []
            await diagnose(what, findings.append)
            return [finding for finding in findings if finding.check == "bandwidth"]

        (rates,) = asyncio.run(look())
    figures = [float(figure.replace(",", "")) for figure in re.findall(r"([\d,]+) MB/s", rates.text)]
    assert len(figures) == 2, rates.text
    assert all(0 < figure <= 55 for figure in figures)  # a tenth more is caught up behind a late timer


def test_a_bucket_that_fails_now_and_then_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.inject(FaultPlan(probabilities={FaultKind.INTERNAL_ERROR: 0.04}, key_prefix="data/data/", seed=1))
        assert levels(found(limits=ProbeLimits(size_bytes=4 << 20))) == {"errors": "warning"}


@pytest.mark.parametrize("kind", [FaultKind.SLOW_DOWN, FaultKind.INTERNAL_ERROR])
def test_a_bucket_that_fails_often_is_a_problem(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.inject(FaultPlan(probabilities={kind: 0.3}, key_prefix="data/data/", seed=1))
        problem = found(limits=ProbeLimits(size_bytes=4 << 20))["errors"]
    assert problem.level is Level.PROBLEM
    assert ("with a request to send fewer (503, 429)" in problem.text) == (kind is FaultKind.SLOW_DOWN)


def test_a_limit_on_requests_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.reshape(NetworkShape(first_byte_seconds=0.02, gets_per_second=25, gets_burst=10))
        findings = found(limits=ProbeLimits(size_bytes=4 << 20))
    assert levels(findings) == {"throttling": "warning"}
    assert "were refused (503 SlowDown, 429)" in findings["throttling"].text
    assert findings["throttling"].command == "stoker plan URL --gpu-rate N"


def test_reads_that_are_late_now_and_then_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.reshape(NetworkShape(first_byte_seconds=0.02, tail_fraction=0.05, tail_seconds=2.0, seed=2))
        findings = found(is_shaped=True, limits=ProbeLimits(size_bytes=4 << 20))
    assert findings["latency"].level is Level.WARNING
    assert "late)" in findings["latency"].text


def test_a_spoilt_or_missing_object_is_a_problem_and_names_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        key = min(key for key in running.objects["stoker"] if "/data/" in key)
        data = bytearray(running.objects["stoker"][key].data)
        data[len(data) // 2] ^= 1
        running.put("stoker", key, bytes(data))
        spoilt = found()["read"]
        del running.objects["stoker"][key]
        missing = found()["read"]
    assert "is not what was packed: its crc32c is" in spoilt.text
    assert spoilt.level is missing.level is Level.PROBLEM
    assert spoilt.command == missing.command == "stoker verify URL"
    assert spoilt.advice
    assert missing.advice


def test_super_samples_packed_with_a_limit_of_1_mib_are_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch):
        pack(URL, samples=1200, super_sample_bytes=1 << 20)
        assert found() == {}


def test_no_more_open_files_are_advised_than_the_hard_limit() -> None:
    (low,) = (
        each
        for each in machine_findings(replace(GOOD, open_files=100, max_open_files=100))
        if each.check == "open files"
    )
    assert low.command == ""
    assert "the hard limit is 100: have it raised where this process is started" in low.advice
    (soft,) = (each for each in machine_findings(replace(GOOD, open_files=100)) if each.check == "open files")
    assert soft.command == "ulimit -n 4096"


def test_a_bucket_that_always_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        running.inject(FaultPlan(probabilities={FaultKind.INTERNAL_ERROR: 1.0}))
        assert levels(found()) == {"read": "problem"}


@pytest.mark.parametrize("body", [b"", b"\x00" * 100, b"<html>sign in to the wireless network</html>"])
def test_what_is_no_manifest_is_a_problem(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    with bucket(monkeypatch) as running:
        running.put("stoker", "data/manifest.safetensors", body)
        assert levels(found()) == {"read": "problem"}


def test_a_super_sample_that_is_gone_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as running:
        pack(URL)
        for key in [key for key in running.objects["stoker"] if key.startswith("data/data/")]:
            del running.service.buckets["stoker"].objects[key]
        problem = found()["read"]
        assert (problem.level, problem.command) == (Level.PROBLEM, "stoker verify URL")


def test_conditions_that_are_ignored_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch):
        pack(URL)
        monkeypatch.setattr("stoker_local._s3.operations.check_write_conditions", lambda bucket, call: None)
        assert levels(found(write=True)) == {"conditional write": "problem"}


def test_small_super_samples_are_a_warning_with_the_command_that_mends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch):
        pack(URL, super_sample_bytes=32 << 10)
        findings = found()
    assert levels(findings) == {"super-sample size": "warning"}
    assert findings["super-sample size"].command == "stoker compact URL"


def test_a_rate_that_objects_are_too_small_to_tell_is_not_shown_as_measured(tmp_path: Path) -> None:
    pack(str(tmp_path / "small"), samples=20, super_sample_bytes=64 << 10)

    async def look() -> list[Finding]:
        what = DoctorConfig(url=str(tmp_path / "small"), limits=QUICK, machine=lambda: GOOD, whereabouts=MachineRegion)
        findings: list[Finding] = []
        await diagnose(what, findings.append)
        return [finding for finding in findings if finding.check == "bandwidth"]

    (rates,) = asyncio.run(look())
    assert (rates.level, rates.text) == (Level.NOTE, "not measured: the objects are too small to tell")


def test_an_endpoint_that_is_not_there_is_one_problem() -> None:
    nowhere = S3Options(endpoint_url="http://127.0.0.1:9", access_key_id="a", secret_access_key="MARKER")
    assert levels(found(options=nowhere)) == {"endpoint": "problem"}


def test_missing_credentials_are_one_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with bucket(monkeypatch):
        pack(URL)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        assert levels(found()) == {"credentials": "problem"}


def test_a_manifest_version_behind_the_pointer_is_a_warning(tmp_path: Path) -> None:
    pack(str(tmp_path / "d"))
    pointer = (tmp_path / "d/manifest.safetensors").read_bytes()
    with stoker.Packer(
        str(tmp_path / "d"), schema={"data": stoker.Array("uint8", (16, 1024))}, mode="append"
    ) as packer:
        packer.write({"data": np.zeros((16, 1024), np.uint8)})
    assert found(str(tmp_path / "d")) == {}
    (tmp_path / "d/manifest.safetensors").write_bytes(pointer)
    assert levels(found(str(tmp_path / "d"))) == {"newest version": "warning"}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (replace(GOOD, open_files=256), {"open files": "warning"}),
        (replace(GOOD, open_files=64), {"open files": "problem"}),
        (replace(GOOD, free_bytes=200 << 20), {"memory": "warning"}),
        (replace(GOOD, free_bytes=10 << 20), {"memory": "warning", "super-sample size": "problem"}),
    ],
)
def test_a_machine_with_too_little_is_found_out(tmp_path: Path, machine: Machine, expected: dict[str, str]) -> None:
    pack(str(tmp_path / "d"))
    assert levels(found(str(tmp_path / "d"), machine=lambda: machine)) == expected


def test_a_folder_and_a_gcs_bucket_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(str(tmp_path / "d"))
    assert found(str(tmp_path / "d"), write=True) == {}
    with running_gcs() as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        pack("gs://stoker/data")
        assert found("gs://stoker/data", write=True) == {}


def test_memory_that_holds_a_data_set_is_fine() -> None:
    pack("memory://doctored/data")
    assert found("memory://doctored/data", write=True) == {}


def test_the_command_exits_with_1_and_reports_a_problem_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(str(tmp_path / "d"))
    assert main(["doctor", str(tmp_path / "d"), "--json"]) == 0
    fine = json.loads(capsys.readouterr().out)
    assert fine["ok"] is True
    assert {"check", "level", "text", "advice", "command"} == set(fine["findings"][0])
    (tmp_path / "none").mkdir()
    assert main(["doctor", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().out
    assert "FAIL  read" in said
    assert "".join(said.split()).count(f"stokerpackSOURCE{tmp_path / 'none'}") == 1
    assert main(["doctor", "ftp://x"]) == 2


def test_what_is_shown_fits_80_columns_and_holds_nothing_that_is_not_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with bucket(monkeypatch):
        assert main(["doctor", "s3://stoker/\x1b[2Jdata"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert all(len(line) <= 80 for line in lines if "stoker pack" not in line)


def test_a_remedy_of_several_findings_is_written_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = "stoker plan URL --gpu-rate N"
    twice = [Finding(check, Level.WARNING, "slow", command=plan) for check in ("latency", "bandwidth")]

    async def examined(what: DoctorConfig, tell: Callable[[Finding], object]) -> None:
        for finding in twice:
            tell(finding)

    monkeypatch.setattr("stoker.cli.info.diagnose", examined)
    assert main(["doctor", "x"]) == 0
    assert capsys.readouterr().out.count("stoker plan x --gpu-rate N") == 1
    assert main(["doctor", "x", "--json"]) == 0
    assert [each["command"] for each in json.loads(capsys.readouterr().out)["findings"]] == [plan, plan]


# What a function serves

TOKEN_KEYS = TokenKeys({"MARKER-id": b"MARKER".ljust(32, b"x")})


def token(hours: float, *, keys: TokenKeys = TOKEN_KEYS) -> ServedOptions:
    now = int(time.time())
    begins = min(now, now + int(3600 * hours)) - 3600
    grant = Grant(datasets=("train",), not_before_seconds=begins, expires_seconds=now + int(3600 * hours))
    return ServedOptions(token=keys.sign(grant))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    pack(str(tmp_path / "d"), samples=20)
    with running_service({"train": str(tmp_path / "d")}, with_token=True, token_keys=TOKEN_KEYS) as hosted:
        yield hosted.dataset("train")


def test_a_function_that_serves_is_looked_at_as_a_bucket_is(served: str) -> None:
    async def look() -> dict[str, Finding]:
        what = DoctorConfig(
            url=served, options=token(5), limits=QUICK, machine=lambda: GOOD, whereabouts=MachineRegion, write=True
        )
        findings: list[Finding] = []
        await diagnose(what, findings.append)
        return {finding.check: finding for finding in findings}

    findings = asyncio.run(look())
    assert "MARKER" not in repr(findings)
    assert findings["endpoint"].text == f"{served.removeprefix('stoker+')} answers"
    assert findings["clock"].text == "right"
    assert findings["credentials"].text in {"a token of stoker's, for 4 hours", "a token of stoker's, for 5 hours"}
    assert findings.keys() >= {"latency", "bandwidth"}  # which say what else this machine is doing
    amiss = {check for check, each in findings.items() if each.level is not Level.OK}
    assert amiss - {"latency", "bandwidth"} == {"write"}
    assert findings["write"].level is Level.NOTE


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (token(0.5), {"credentials": "warning"}),
        (token(-3), {"credentials": "problem"}),
        (token(5, keys=TokenKeys({"k": b"y" * 32})), {"credentials": "problem"}),
        (ServedOptions(anonymous=True), {"credentials": "problem"}),
    ],
)
def test_a_token_that_ends_soon_or_is_refused_is_found_out(
    served: str, options: ServedOptions, expected: dict[str, str]
) -> None:
    assert levels(found(served, options=options)) == expected


def test_the_clock_is_compared_with_that_of_a_function(served: str) -> None:
    skewed = found(served, options=token(5), clock=lambda: time.time() - 1000)
    assert levels(skewed) == {"clock": "problem"}


def test_a_function_that_is_not_there_is_one_problem() -> None:
    assert levels(found("stoker+http://127.0.0.1:9/v1/train", options=token(5))) == {"endpoint": "problem"}


def test_a_data_set_that_is_not_served_is_not_to_be_packed_there(served: str) -> None:
    problem = found(f"{served}x", options=ServedOptions(token=token(5).token))["read"]
    assert (problem.level, problem.command) == (Level.PROBLEM, "")
