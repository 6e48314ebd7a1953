"""What docs/function-cloud.md shows works as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from stoker_local.functions import FunctionCloudConfig

PAGE = (Path(__file__).parents[2] / "docs" / "function-cloud.md").read_text("utf-8")


def test_the_program_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\s*```text\n(.*?)```", PAGE, re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(code)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stderr, ended.stdout) == ("", shown)


def test_the_configuration_of_the_page_is_valid() -> None:
    (document,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    config = FunctionCloudConfig.from_json(document)
    assert config.notifications[0].suffix == ".jpg"
    assert sum(config.faults.probabilities.values()) > 0
