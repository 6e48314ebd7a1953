"""The commands on the page of the local bucket work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "local-bucket.md").read_text()


def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    (said,) = re.findall(r"It prints `(.*?)`", PAGE)
    path = tmp_path / "program.py"
    path.write_text(program)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stderr, ended.stdout.strip()) == ("", said)
