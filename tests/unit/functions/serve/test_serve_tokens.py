"""Authentication with tokens: accepted requests, and errors of the others."""

from __future__ import annotations

import pytest

from stoker._stores.access_token import Grant
from stoker.errors import ConfigError
from stoker_functions.serve import Request, Response, ServeConfig, TokenKeys
from support.datasets import pack_numbers
from support.served_requests import error_of, with_service

NOW = 1_800_000_000
KEYS = TokenKeys({"k": b"s" * 32})


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    url = pack_numbers(20)
    return ServeConfig(datasets={"train": url, "val": url}, token_keys=KEYS)


def token_for(*datasets: str, keys: TokenKeys = KEYS) -> str:
    return keys.sign(Grant(datasets=datasets, not_before_seconds=NOW, expires_seconds=NOW + 60))


def answer(
    config: ServeConfig,
    authorization: str | None,
    path: str = "/v1/train/manifest",
    *,
    now: float = NOW,
    method: str = "GET",
) -> Response:
    headers = {} if authorization is None else {"authorization": authorization}
    request = Request(method=method, path=path, headers=headers)
    response: Response = with_service(config, lambda service: service.answer_with_token(request), clock=lambda: now)
    return response


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "Bearer   "])
def test_a_token_opens_the_data_sets_that_it_names(config: ServeConfig, scheme: str) -> None:
    authorization = scheme + token_for("val", "train")
    for name in ("train", "val"):
        assert answer(config, authorization, f"/v1/{name}/manifest").status == 200


def test_a_token_for_others_is_403_whether_the_data_set_is_there_or_not(config: ServeConfig) -> None:
    authorization = f"Bearer {token_for('val')}"
    refused = [answer(config, authorization, f"/v1/{name}/manifest") for name in ("train", "other")]
    assert [(each.status, error_of(each)) for each in refused] == [(403, "forbidden")] * 2
    assert refused[0].body == refused[1].body
    named = answer(config, f"Bearer {token_for('other')}", "/v1/other/manifest")
    assert (named.status, error_of(named)) == (404, "no-such-dataset")


GOOD = token_for("train")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        GOOD,
        f"Basic {GOOD}",
        f"Bearer {GOOD} ",
        f" Bearer {GOOD}",
        f"Bearer\t{GOOD}",
        f"Bearer {GOOD}, Bearer {GOOD}",
        f"Bearer {GOOD[:-1]}",
        f"Bearer {GOOD}=",
        f"Bearer {token_for('train', keys=TokenKeys({'k': b'x' * 32}))}",
        f"Bearer {token_for('train', keys=TokenKeys({'other': b's' * 32}))}",
        f"Bearer {'A' * 100_000}",
        "Bearer é",
    ],
)
def test_without_a_valid_token_nothing_is_disclosed(config: ServeConfig, authorization: str | None) -> None:
    refused = [answer(config, authorization, path) for path in ("/v1/train/manifest", "/v1/nothing/manifest", "/../x")]
    refused.append(answer(config, authorization, method="DELETE"))
    assert [(each.status, error_of(each)) for each in refused] == [(401, "unauthorized")] * 4
    assert len({bytes(each.body) for each in refused}) == 1
    assert refused[0].headers["WWW-Authenticate"].startswith("Bearer")


def test_a_token_before_and_after_its_time_is_refused(config: ServeConfig) -> None:
    for now in (0.0, NOW - 100, NOW + 200):
        assert answer(config, f"Bearer {GOOD}", now=now).status == 401


def test_without_keys_no_token_is_accepted() -> None:
    response = answer(ServeConfig(datasets={"train": pack_numbers(20)}), f"Bearer {GOOD}")
    assert (response.status, error_of(response)) == (500, "failed")


def test_what_the_platform_has_let_in_needs_no_token(config: ServeConfig) -> None:
    request = Request(method="GET", path="/v1/train/manifest")
    assert with_service(config, lambda service: service.answer(request)).status == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"datasets": {"a/b": "x"}},
        {"answer_bytes": 0},
        {"redirect_seconds": 0},
        {"answer_seconds": 0.0},
        {"memory_bytes": -1},
    ],
)
def test_a_service_that_could_serve_nothing_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(**{"datasets": {}, **changes})  # type: ignore[arg-type]  # wrong on purpose
