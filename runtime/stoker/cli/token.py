"""``stoker token``: creates tokens that let clients without cloud credentials read data sets for a limited time."""

from __future__ import annotations

import os
import secrets
import time
from argparse import ArgumentParser, Namespace

from stoker._stores.access_token import MIN_KEY_BYTES, Grant, TokenKeys, format_key
from stoker.cli.flags import number_from
from stoker.errors import ConfigError

_KEYS_VARIABLE = "STOKER_TOKEN_KEYS"
_DEFAULT_HOURS = 24
_parse_hours = number_from(1e-6, 366 * 24)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        f"The keys are read from the variable {_KEYS_VARIABLE}, as in the serving function; the first key signs."
    )
    parser.set_defaults(example="stoker token --dataset flowers --hours 8")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--dataset", action="append", metavar="NAME", help="data set to permit; may be repeated")
    group.add_argument(
        "--new-key", metavar="ID", help=f"create a key for {_KEYS_VARIABLE} and print it instead of a token"
    )
    parser.add_argument("--hours", type=_parse_hours, metavar="N", help="validity of the token in hours (default: 24)")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if args.new_key is not None:
        if args.hours is not None:
            raise ConfigError(
                f"--hours is for tokens; a key of --new-key is valid until it is removed from {_KEYS_VARIABLE}"
            )
        print(format_key(args.new_key, secrets.token_bytes(MIN_KEY_BYTES)))
        return 0
    keys = os.environ.get(_KEYS_VARIABLE)
    if not keys:
        raise ConfigError(f"{_KEYS_VARIABLE} is not set; create a key for it with: stoker token --new-key ID")
    now_seconds = int(time.time())
    grant = Grant(
        datasets=tuple(args.dataset),
        not_before_seconds=now_seconds,
        expires_seconds=now_seconds + max(1, int((args.hours or _DEFAULT_HOURS) * 3600)),
    )
    print(TokenKeys.parse(keys).sign(grant))
    return 0
