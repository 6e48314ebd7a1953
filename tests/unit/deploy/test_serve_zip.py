"""The zip that serve runs from: small, whole, and the same bytes every time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from support.installed_wheels import closure, copied

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def serve_zip() -> ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("serve_zip", ROOT / "infra" / "serverless" / "serve_zip.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "needed"),
    [
        ("stoker/_order/order.py", True),
        ("stoker/prices.toml", True),
        ("stoker_functions/serve/service.py", True),
        ("stoker_torch/loader.py", False),
        ("stoker_local/bucket.py", False),
        ("numpy/_core/tests/test_shape_base.py", False),
        ("numpy/testing/__init__.py", True),
        ("numpy/__init__.pyi", False),
        ("botocore/data/s3/2006-03-01/service-2.json.gz", True),
        ("botocore/data/partitions.json", True),
        ("botocore/data/ec2/2016-11-15/service-2.json.gz", False),
        ("bin/jp.py", False),
        ("tests.py", True),
    ],
)
def test_what_no_request_needs_is_left_out(serve_zip: ModuleType, file: str, needed: bool) -> None:
    assert serve_zip.is_needed(Path(file)) is needed


def test_the_same_files_make_the_same_bytes(serve_zip: ModuleType, tmp_path: Path) -> None:
    zips = []
    for name, order in (("one", "ab"), ("two", "ba")):
        for file in order:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{file}.py").write_text(file)
        serve_zip.write_zip(tmp_path / name, tmp_path / f"{name}.zip")
        zips.append((tmp_path / f"{name}.zip").read_bytes())
    assert zips[0] == zips[1]


def test_more_than_lambda_takes_is_an_error(
    serve_zip: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_zip, "UNPACKED_LIMIT_BYTES", 3)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text("12345")
    with pytest.raises(SystemExit, match="Lambda takes"):
        serve_zip.write_zip(tmp_path / "in", tmp_path / "out.zip")


def test_the_handlers_import_and_an_s3_client_is_made_from_what_is_in_the_zip(
    serve_zip: ModuleType, tmp_path: Path
) -> None:
    copied(closure(["stoker[aws]"]).values(), tmp_path / "installed")
    size_bytes = serve_zip.write_zip(tmp_path / "installed", tmp_path / "serve.zip")
    print(f"{size_bytes / 1e6:.0f} MB, {(tmp_path / 'serve.zip').stat().st_size / 1e6:.0f} MB as a zip")
    assert size_bytes < 150_000_000
    with zipfile.ZipFile(tmp_path / "serve.zip") as archive:
        archive.extractall(tmp_path / "task")
    program = f"""
import asyncio, sys
sys.path[:] = [{str(tmp_path / "task")!r}, *(path for path in sys.path if "site-packages" not in path)]
import stoker_functions.aws
from aiobotocore.session import AioSession
async def client():
    keys = dict(aws_access_key_id="a", aws_secret_access_key="b")
    async with AioSession().create_client("s3", region_name="us-east-1", **keys) as s3:
        print(await s3.generate_presigned_url("get_object", Params=dict(Bucket="bucket", Key="key")))
asyncio.run(client())
print(sorted(name for name in ("torch", "stoker_torch", "stoker_local") if name in sys.modules))
"""
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"
    assert run.stdout.startswith("https://bucket.s3.amazonaws.com/key?")
