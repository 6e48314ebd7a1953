"""Make the zip that serve runs from on Lambda: ``python infra/serverless/serve_zip.py dist/serve.zip``.

Wheels for Lambda's Python and system, at the versions of ``constraints.txt``, without what no request needs: tests,
type stubs, and the descriptions of the AWS services that are never called. The same files make the same bytes, so that
an unchanged function is not deployed again.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PYTHON = "3.13"  # as in serverless.yml
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")  # Lambda's Amazon Linux 2023 has glibc 2.34
CALLED_SERVICES = ("s3", "sts")
UNPACKED_LIMIT_BYTES = 250 << 20  # Lambda's, of code and layers
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # of zip files


def install(folder: Path) -> None:
    """Install stoker and what serve needs of its dependencies into a folder, as they are on Lambda."""
    pip = [sys.executable, "-m", "pip"]
    with TemporaryDirectory() as wheels:
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, str(ROOT)], check=True)  # noqa: S603
        (wheel,) = Path(wheels).glob("stoker-*.whl")
        command = [*pip, "install", "--quiet", "--target", str(folder), "--only-binary=:all:", "--no-compile"]
        command += ["--implementation=cp", f"--python-version={PYTHON}"]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        command += ["--constraint", str(ROOT / "constraints.txt"), f"{wheel}[aws]"]
        subprocess.run(command, check=True)  # noqa: S603 - pip, with arguments of our own


def is_needed(path: Path) -> bool:
    """Return whether a file, named relative to the folder that was installed into, is needed by a request."""
    parts = path.parts
    if parts[0] in ("bin", "stoker_local", "stoker_torch") or path.suffix in (".pyi", ".pyc"):
        return False
    if "tests" in parts[:-1]:
        return False
    return parts[:2] not in (("botocore", "data"), ("boto3", "data")) or len(parts) == 3 or parts[2] in CALLED_SERVICES


def needed_files(folder: Path) -> Iterator[Path]:
    """Yield what is needed of a folder, sorted, relative to it."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    yield from (file for file in files if is_needed(file))


def write_zip(folder: Path, target: Path) -> int:
    """Zip what is needed of a folder; return how many bytes that is unpacked.

    Raises:
        SystemExit: it is more than Lambda takes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    size_bytes = 0
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in needed_files(folder):
            entry = zipfile.ZipInfo(file.as_posix(), _FIRST_DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            data = (folder / file).read_bytes()
            archive.writestr(entry, data)
            size_bytes += len(data)
    if size_bytes > UNPACKED_LIMIT_BYTES:
        raise SystemExit(
            f"{target} is {size_bytes >> 20} MB unpacked, and Lambda takes {UNPACKED_LIMIT_BYTES >> 20} MB"
        )
    return size_bytes


def main(target: Path) -> None:
    """Make the zip."""
    with TemporaryDirectory() as folder:
        install(Path(folder))
        size_bytes = write_zip(Path(folder), target)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {size_bytes / 1e6:.1f} MB unpacked")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
