"""Wrong names and types of arguments: the error contains the remedy."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker import FetchConfig
from stoker._base.arguments import AtLeastOne, BoundedConfig, Finite, Fraction, NotNegative, NumberBound, Positive
from stoker.errors import ArgumentError, ConfigError, SchemaError
from stoker.testing import DyingStore
from stoker.trace import ChromeTrace
from stoker_torch import CachedDataset, Loader, LoaderConfig, RaggedColumn, StreamDataset

SCHEMA = {"x": stoker.Array("int64")}


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "numbers")
    with stoker.Packer(url, schema=SCHEMA) as packer:
        packer.extend({"x": number} for number in range(20))
    return url


@pytest.mark.parametrize(
    ("construct", "said"),
    [
        (lambda url: Loader(url, batch_size=4, num_workers=2), r"^Loader .*num_workers=; use workers=, threads"),  # type: ignore[call-arg]
        (lambda url: Loader(url, batch_size=4, shufle="full"), r"shufle=; did you mean shuffle="),  # type: ignore[call-arg]
        (lambda url: Loader(url, batchsize=4), r"did you mean batch_size="),  # type: ignore[call-arg]
        (lambda url: Loader(url), r"^Loader needs the argument batch_size="),  # type: ignore[call-arg]
        (lambda url: StreamDataset(url, num_workers=2), r"^StreamDataset .*give it to the DataLoader; workers="),  # type: ignore[call-arg]
        (lambda url: StreamDataset(url, colums=["x"]), r"did you mean columns="),  # type: ignore[call-arg]
        (lambda url: stoker.open(url, colums=["x"]), r"^stoker.open .*did you mean columns="),  # type: ignore[call-arg]
        (lambda url: stoker.open(url, shuffle=True), r"stoker_torch\.Loader"),  # type: ignore[call-arg]
        (lambda url: stoker.Packer(url, schema=SCHEMA, overwrite=True), r"use mode='overwrite'"),  # type: ignore[call-arg]
        (lambda url: stoker.Packer(url, shcema=SCHEMA), r"^Packer .*did you mean schema="),  # type: ignore[call-arg]
        (lambda url: stoker.Packer(url), r"^Packer needs the argument schema="),  # type: ignore[call-arg]
        (lambda url: stoker.S3Options(endpoint="http://x"), r"did you mean endpoint_url="),  # type: ignore[call-arg]
        (lambda url: FetchConfig(xyz=1), r"^FetchConfig has no argument xyz=; it takes deadline_seconds, "),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_name_is_an_error_that_says_what_to_write(
    url: str, construct: Callable[[str], object], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        construct(url)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "kind",
    [Loader, StreamDataset, LoaderConfig, CachedDataset, stoker.Packer, stoker.open, FetchConfig, stoker.S3Options],
)
def test_signatures_stay_explicit(kind: Callable[..., object]) -> None:
    parameters = inspect.signature(kind).parameters
    assert len(parameters) > 2
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters.values())


@pytest.mark.parametrize(("shuffle", "taken"), [(True, "window"), (False, "none")])
def test_shuffle_is_taken_as_a_data_loader_takes_it(url: str, shuffle: Any, taken: str) -> None:
    with Loader(url, batch_size=4, shuffle=shuffle) as loader:
        assert loader.config.shuffle == taken
    assert StreamDataset(url, shuffle=shuffle).config.shuffle == taken


@pytest.mark.parametrize("shuffle", [None, True])
def test_a_loader_in_a_data_loader_is_an_error_with_the_remedy(url: str, shuffle: bool | None) -> None:
    with Loader(url, batch_size=4) as loader, pytest.raises(TypeError, match=r"iterate over the Loader.*StreamDataset"):
        next(iter(DataLoader(loader, batch_size=2, shuffle=shuffle)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "construct", [lambda url: Loader(url, batch_size=4, memory="1G"), lambda url: stoker.open(url, memory="1G")]
)
def test_a_size_without_its_unit_names_both_units(url: str, construct: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match=r"^memory '1G' .*1GB .*1GiB"):
        construct(url)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"max_dollars_per_epoch": None},
            r"^max_dollars_per_epoch must be a number of dollars, float\('inf'\) for no limit, not None",
        ),
        ({"max_dollars_per_epoch": "1"}, r"^max_dollars_per_epoch must be .* not '1'"),
        ({"max_dollars_per_epoch": float("nan")}, r"^max_dollars_per_epoch must be .* not nan"),
        ({"fetch": "x"}, r"^fetch must be a FetchConfig.*not 'x'"),
        ({"fetch": None}, r"^fetch must be a FetchConfig.*not None"),
        ({"trace": "s3://bucket/trace.json"}, r"^trace 's3://bucket/trace.json' is a URL; name a file"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_a_setting_of_a_wrong_type_is_refused(url: str, settings: dict[str, Any], said: str) -> None:
    for kind in (Loader, StreamDataset):
        if kind is Loader or "trace" not in settings:
            with pytest.raises(ConfigError, match=said):
                kind(url, batch_size=4, **settings)


def test_open_and_packer_refuse_what_is_no_configuration(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^fetch must be a FetchConfig"):
        stoker.open(url, fetch="x")  # type: ignore[arg-type]
    for schema in ("x", None, ["x"]):
        with pytest.raises(SchemaError, match=r"^a schema must be a dictionary"):
            stoker.Packer(url, schema=schema)  # type: ignore[arg-type]


def test_what_is_no_list_of_numbers_is_refused(url: str) -> None:
    with stoker.open(url) as dataset, pytest.raises(ArgumentError, match=r"indices must be a sequence.*\[1, \[2\]\]"):
        dataset.samples([1, [2]])  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [None, slice(None, None, -1), 1.5, "a", [1, [2]], [[0, 1]], [0.5], ...])
def test_what_selects_nothing_of_a_column_is_refused(index: Any) -> None:
    with pytest.raises(ArgumentError, match="column"):
        _column()[index]


@pytest.mark.parametrize(
    ("index", "values"),
    [
        (slice(None, None, 2), [b"", b"cc"]),
        ([2, 0], [b"cc", b""]),
        ([], []),
        ((1, -1), [b"b", b"cc"]),
        ([True, False, True], [b"", b"cc"]),
        (torch.tensor([1]), [b"b"]),
        (torch.tensor([0, 1, 0], dtype=torch.uint8), [b"b"]),
    ],
)
def test_several_samples_of_a_column_are_selected(index: Any, values: list[bytes]) -> None:
    assert list(_column()[index]) == values
    assert _column()[torch.tensor(2)] == b"cc"


def _column() -> RaggedColumn:
    return RaggedColumn(stoker.Bytes(), torch.tensor(list(b"bcc"), dtype=torch.uint8), torch.tensor([0, 0, 1, 3]))


def test_without_torch_the_import_names_the_line_that_installs_it() -> None:
    program = "import sys; sys.modules['torch'] = None\nimport stoker_torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stoker.errors.MissingExtraError:")
    assert last.endswith("pip install 'stoker[torch]'")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"schedule": stoker.Continuous}, r"such as stoker\.Continuous\(\), not <class"),
        ({"tier": DyingStore}, r"tier must be an instance of DyingStore, not the class itself"),
        ({"trace": [ChromeTrace]}, r"a sink such as ChromeTrace\(path\), not <class"),
    ],
)
def test_a_class_in_the_place_of_an_object_of_it_is_refused(url: str, setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Loader(url, batch_size=4, **setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(BoundedConfig):
    """Fields of each kind of bound."""

    rate: Positive[float] = 1.0
    pause: Finite[NotNegative[float]] = 0.0
    share: Fraction[float] = 0.5
    depth: AtLeastOne[int] | None = None
    errors: Annotated[float, NumberBound(">=", 0), NumberBound("<", 1)] = 0.0
    shuffle: Literal["none", "full"] | None = "none"
    name: str = ""


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rate", 0, "rate must be more than 0, not 0"),
        ("rate", float("nan"), "rate must be more than 0, not nan"),
        ("rate", "fast", "rate must be more than 0, not 'fast'"),
        ("rate", None, "rate must be more than 0, not None"),
        ("pause", float("inf"), "pause must be at least 0 and less than inf, not inf"),
        ("share", 1.5, "share must be at least 0 and at most 1, not 1.5"),
        ("depth", 0, "depth must be at least 1, or None, not 0"),
        ("errors", 1, "errors must be at least 0 and less than 1, not 1"),
        ("shuffle", "fully", "shuffle must be one of none, full, or None, not 'fully'"),
    ],
)
def test_a_value_beyond_the_bounds_of_its_field_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        Settings(**{field: value})


def test_values_within_the_bounds_of_their_fields_are_taken() -> None:
    Settings(rate=float("inf"), pause=0, share=1, depth=1, errors=0, shuffle="full")
    Settings(depth=None, shuffle=None, name="any text")
