"""``python -m tools.codemod [TABLE]``: apply a table to the work tree that this is run in."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.codemod.repository import apply
from tools.codemod.table import Table


def main() -> None:
    """Apply the table, and print what was done and what a person has to look at."""
    parser = argparse.ArgumentParser(prog="python -m tools.codemod", description="Move modules, as a table says.")
    parser.add_argument(
        "table", nargs="?", type=Path, default=Path(__file__).with_name("moves.toml"), help="a TOML file"
    )
    report = apply(Path.cwd(), Table.load(parser.parse_args().table))
    print(f"{report.moved} files moved, {len(report.rewritten)} rewritten")
    for file, doubts in report.doubts.items():
        print(f"left alone in {file}: {', '.join(doubts)}")


if __name__ == "__main__":
    main()
