from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from argparse import PARSER, ArgumentParser, Namespace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from stoker import GcsOptions, S3Options, ServedOptions, cli
from stoker._version import __version__
from stoker.cli import CommandParser, flags, pack
from stoker.errors import ConfigError
from support.serving_host import running_service


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("word", nargs="?")


def run(args: Namespace) -> int:
    if args.code == 130:
        raise KeyboardInterrupt
    return int(args.code)


command = cli.Command(name="extra", help="an extra command", configure=configure, run=run)
not_a_command = "hello"


def contribute(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = [EntryPoint(name, value, "stoker.commands") for name, value in points.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: found if group == "stoker.commands" else [])


@pytest.fixture(autouse=True)
def this_module(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setitem(sys.modules, "extra_commands", sys.modules[__name__])


def test_another_package_contributes_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    contribute(monkeypatch, extra="extra_commands:command")
    assert cli.main(["extra", "--code", "7"]) == 7
    assert cli.main(["extra", "info"]) == 0


@pytest.mark.parametrize("value", ["no_such_module:command", "extra_commands:nothing", "extra_commands:not_a_command"])
def test_a_broken_contribution_breaks_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    contribute(monkeypatch, broken=value, extra="extra_commands:command")
    assert cli.main(["extra"]) == 0
    assert cli.main(["broken", "--any", "thing"]) == 1
    assert f"the command broken ({value}) cannot be loaded" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0


def test_our_own_commands_load_no_contribution_and_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: pytest.fail(f"{group} were loaded"))
    assert cli.main(["info", "memory://nothing-here"]) == 1
    contribute(monkeypatch, info="no_such_module:command", extra="extra_commands:command")
    assert cli.main(["extra"]) == 0


def test_a_contributed_command_is_loaded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(point: EntryPoint) -> cli.Command:
        loaded.append(point.name)
        return command

    monkeypatch.setattr(EntryPoint, "load", load)
    contribute(monkeypatch, extra="a:b", other="c:d")
    assert cli.main(["extra"]) == 0
    assert loaded == ["extra"]


def test_of_two_contributions_with_one_name_ours_is_taken() -> None:
    theirs = EntryPoint("plan", "no_such_module:command", "stoker.commands")
    with pytest.MonkeyPatch.context() as patch:
        ours = list(entry_points(group="stoker.commands"))
        patch.setattr(cli, "entry_points", lambda group: [theirs, *ours, theirs])
        assert cli._find_entry_points()["plan"].value == "stoker_sim._commands:plan_command"


def test_the_list_of_commands_imports_none_of_them() -> None:
    program = (
        "import sys\nfrom stoker import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = {name for name in sys.modules if name.startswith(('stoker.cli.', 'stoker_sim.', 'stoker_warm.'))}\n"
        "print(sorted(loaded), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stderr)) <= {"stoker.cli.flags", "stoker_sim._commands", "stoker_warm._commands"}


def test_an_interrupt_is_130_and_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contribute(monkeypatch, extra="extra_commands:command")
    assert cli.main(["extra", "--code", "130"]) == 130
    assert capsys.readouterr().err == "stoker: interrupted\n"
    parser = ArgumentParser()
    pack.configure(parser)
    assert "running the same command again" in parser.get_default("when_interrupted")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["pack", "only-one"],
        ["pack", "a", "b", "--super-sample-bytes", "8M"],
        ["pack", "a", "b", "--concurrency", "0"],
        ["head", "x", "-n", "-1"],
        ["gc", "x", "--keep-versions", "0"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2


def test_an_unknown_flag_is_answered_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["info", "somewhere", "--jsn"])
    assert left.value.code == 2
    error, usage, more = capsys.readouterr().err.splitlines()
    assert error == "stoker info: error: unrecognized arguments: --jsn"
    assert usage == "usage: stoker info [options] URL"
    assert more == "see: stoker info --help"


@pytest.mark.parametrize("name", [each.name for each in cli.list_commands()])
def test_help_begins_with_the_commands_own_options_and_ends_with_the_buckets(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    usage, *rest = capsys.readouterr().out.split("\n\n")
    assert "--endpoint-url" not in usage
    text = "\n\n".join(rest)
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    titles = [title for title in titles if title != "example:"]
    assert sorted(titles, key=lambda title: title.startswith("how to reach")) == titles
    options = text.partition("\noptions:\n")[2].partition("\n\n")[0]
    flags = [line.split()[0].rstrip(",") for line in options.splitlines() if line.startswith("  -")]
    assert [flag for flag in flags if flag in ("-h", "--debug")] == flags[-2:]


def test_without_a_command_the_five_most_used_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().err
    listed = shown.split("most used:\n")[1].split("\n\n")[0].splitlines()
    names = [line.split()[0] for line in listed if not line.startswith("   ")]
    assert names == ["pack", "info", "verify", "doctor", "plan"]
    assert "stoker --help" in shown


def test_the_help_lists_each_command_once_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out.split("\noptions:\n")[0].splitlines()
    listed = [line.split()[0] for line in shown if line.startswith("  ") and not line.startswith("   ")]
    assert listed == [each.name for each in cli.list_commands()]


@pytest.mark.parametrize(("typed", "meant"), [("pakc", "; do you mean pack?"), ("zzzz", "")])
def test_an_unknown_command_is_answered_with_the_nearest(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([typed])
    assert capsys.readouterr().err.splitlines()[0] == f"stoker: error: there is no command '{typed}'{meant}"


@pytest.mark.parametrize("arguments", [["nonsense"], ["pack", "only-one"], ["warm", "up"], ["trace", "view"]])
def test_a_usage_error_begins_with_the_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert ": error: " in lines[0]
    assert lines[-1].startswith("see: stoker")
    assert lines[-1].endswith(" --help")
    assert any(line.startswith("usage: stoker") for line in lines)


def test_a_wrong_setting_is_2_and_an_error_is_1_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "ftp://x/y"]) == 2
    assert cli.main(["info", "memory://nothing-at-all"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line[:15] for line in lines] == ["stoker: error: "] * 2


@pytest.mark.parametrize("arguments", [["--debug", "info", "ftp://x"], ["info", "ftp://x", "--debug"]])
def test_debug_lets_the_error_through(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        cli.main(arguments)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"stoker {__version__}\n"


def parsed(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    pack.configure(parser)
    return parser.parse_args([*arguments, "SRC", "DST"])


def test_store_flags_become_the_options_of_the_urls_store() -> None:
    args = parsed("--endpoint-url", "http://localhost:1", "--region", "eu-west-1", "--source-anonymous")
    assert flags.store_options(args, "s3://b/x") == S3Options(endpoint_url="http://localhost:1", region="eu-west-1")
    assert flags.store_options(args, "s3://b/x", prefix="source_") == S3Options(anonymous=True)
    assert flags.store_options(args, "gs://b/x", prefix="source_") == GcsOptions(anonymous=True)
    assert flags.store_options(args, "/some/folder") is None
    assert flags.store_options(parsed(), "s3://b/x") is None
    served = parsed("--auth", "aws", "--region", "eu-west-1")
    assert flags.store_options(served, "stoker+https://h/v1/x") == ServedOptions(auth="aws", region="eu-west-1")
    assert flags.store_options(parsed("--anonymous"), "stoker+http://localhost/v1/x") == ServedOptions(anonymous=True)


@pytest.mark.parametrize(
    ("arguments", "url", "message"),
    [
        (["--region", "x"], "gs://b", "takes no --region"),
        (["--requester-pays"], "gs://b", "use --user-project"),
        (["--user-project", "p"], "s3://b", "takes no --user-project"),
        (["--auth", "aws"], "s3://b", "takes no --auth"),
        (["--endpoint-url", "http://h"], "stoker+https://h/v1/x", "takes no --endpoint-url"),
        (["--auth", "google", "--region", "x"], "stoker+https://h/v1/x", "mutually exclusive"),
    ],
)
def test_a_flag_that_the_store_does_not_have_is_refused(arguments: list[str], url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags.store_options(parsed(*arguments), url)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("s3://b/x", "s3://b/x"),
        ("s3://b/x/", "s3://b/x/packed"),
        ("s3://b", "s3://b/packed"),
        ("s3://b/x/data/raw", "s3://b/x"),
        ("in", "in/packed"),
        ("in", "./other/../in"),
        ("in/data", "in"),
        ("in/packs/x.tar", "file:///tmp/../{cwd}/in"),
    ],
)
def test_a_data_set_and_its_source_may_not_lie_in_each_other(source: str, destination: str) -> None:

    with pytest.raises(ConfigError, match="SRC"):
        pack._check_no_overlap(source, destination.replace("{cwd}", str(Path.cwd()).lstrip("/")))


@pytest.mark.parametrize(
    ("source", "destination"),
    [("s3://b/x", "s3://b/xy"), ("in", "out"), ("in/raw", "in"), ("s3://b/x.tar", "s3://b"), ("s3://a/x", "gs://a/x")],
)
def test_neighbours_are_fine(source: str, destination: str) -> None:
    pack._check_no_overlap(source, destination)


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack", "somewhere"],
        ["rebuild-manifest"],
        ["shuffle", "--seed", "1", "--epoch", "0"],
        ["compact"],
        ["gc"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_what_a_function_serves_is_not_written_to(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments, "stoker+https://host/v1/train"])
    assert left.value.code == 2
    assert "stoker+https://host/v1/train; write to the bucket behind it" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["pack", "in"], ["compact"]], ids=lambda command: str(command[0]))
@pytest.mark.parametrize("size", ["0", "1025MiB", "1TB"])
def test_a_super_sample_is_as_large_as_the_format_allows(
    command: list[str], size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "out", "--super-sample-bytes", size])
    assert left.value.code == 2
    most = "1.00 GiB" if command[0] == "pack" else "32.0 MiB"
    assert f"'{size}' is not from 1 B to {most}" in capsys.readouterr().err


def test_where_a_function_serves_nothing_the_address_is_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with running_service({"train": "memory://served"}) as hosted:
        wrong = hosted.dataset("train").replace("/v1", "")
        assert cli.main(["info", wrong]) == 1
    assert f"there is no data set at {wrong}; check the address, which ends with /v1/NAME" in capsys.readouterr().err


def test_a_web_address_is_refused_with_the_missing_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "https://host/v1/train"]) == 2
    assert "stoker+https:// for a data set that a function serves" in capsys.readouterr().err


def commands_and_actions() -> dict[str, CommandParser]:
    """Return the parser of each command without actions, and of each action, by its name on the command line."""
    commands = cli.list_commands()
    found: dict[str, CommandParser] = {}
    waiting: list[CommandParser] = [cli.create_parser(commands, {command.name for command in commands})]
    while waiting:
        each = waiting.pop()
        parsers = [
            parser
            for action in each._actions
            if action.nargs == PARSER and isinstance(action.choices, dict)
            for parser in action.choices.values()
        ]
        waiting += parsers
        if not parsers:
            found[each.prog] = each
    return found


PARSERS = commands_and_actions()
WITHOUT_JSON = {
    "stoker completion": "prints a script",
    "stoker demo": "shows a picture that moves",
    "stoker mount": "prints where the files are, and serves",
    "stoker tier secret": "prints one word",
    "stoker tier serve": "prints its URL and serves",
    "stoker tier token": "prints one word",
    "stoker token": "prints one word",
    "stoker trace picture": "writes a picture",
    "stoker warm proxy": "prints its URL and serves",
    "stoker warm secret": "prints one word",
}
"""The commands whose output is not a result with fields."""


def test_every_command_with_a_result_writes_it_as_json() -> None:
    assert {name for name, parser in PARSERS.items() if "--json" not in parser.format_help()} == WITHOUT_JSON.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_the_help_of_a_command_ends_with_an_example_that_is_valid(name: str) -> None:
    *_, title, example = PARSERS[name].format_help().splitlines()
    assert title == "example:"
    words = shlex.split(example.partition(" > ")[0])
    assert " ".join(words).startswith(f"{name} ") or " ".join(words) == name
    commands = cli.list_commands()
    cli.create_parser(commands, {words[1]}).parse_args(words[1:])
