import pytest

from stoker_local._s3.model import parse_byte_range


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=2-4", (2, 5)),
        ("bytes=2-", (2, 10)),
        ("bytes=2-99", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
    ],
)
def test_a_plain_range_is_cut_to_the_object(header: str, span: tuple[int, int]) -> None:
    assert parse_byte_range(header, 10) == span


@pytest.mark.parametrize("header", ["", "bytes=", "bytes=-", "bytes=4-2", "bytes=0-1,3-4", "items=0-1", "bytes=a-b"])
def test_what_is_not_one_plain_range_is_ignored(header: str) -> None:
    assert parse_byte_range(header, 10) is None


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=10-12", 10), ("bytes=-0", 10), ("bytes=0-0", 0)]
)
def test_a_range_without_bytes_does_not_start_before_its_end(header: str, size: int) -> None:
    span = parse_byte_range(header, size)
    assert span is not None
    assert span[0] >= span[1]
