import pytest

from stoker_local import PROFILES, BucketConfig, BucketSpec, Fault, FaultKind, FaultPlan, KeyPair


def test_a_configuration_survives_its_way_as_json() -> None:
    config = BucketConfig(
        port=1,
        region="eu-west-1",
        keys=(KeyPair(access_key="a", secret_key="s", buckets=("one",)), KeyPair(access_key="b", secret_key="s")),
        buckets=(BucketSpec(name="one", anonymous=True), BucketSpec(name="two", requester_pays=True)),
        shape=PROFILES["cloud-tail"],
        faults=FaultPlan(script=(None, Fault(kind=FaultKind.STALL)), probabilities={FaultKind.RESET: 0.5}),
    )
    assert BucketConfig.from_json(config.to_json()) == config


def test_names_may_not_repeat() -> None:
    with pytest.raises(ValueError, match="bucket is named twice"):
        BucketConfig(buckets=(BucketSpec(name="one"), BucketSpec(name="one")))


@pytest.mark.parametrize("name", ["", "ab", "Upper", "a/b", "-ab", "a" * 64])
def test_an_impossible_bucket_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a bucket name"):
        BucketSpec(name=name)


def test_a_key_pair_does_not_print_its_secrets() -> None:
    key = KeyPair(access_key="id", secret_key="hidden", session_token="hidden")
    assert "hidden" not in f"{key!r} {BucketConfig(keys=(key,))!r}"
