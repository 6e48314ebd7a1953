from hypothesis import given
from hypothesis import strategies as st

from stoker_local._s3.model import ListingPage, list_page

_KEYS = st.sets(st.text(st.sampled_from("ab/é\ud7ff\U0010ffff"), min_size=1, max_size=6), max_size=30)


def _all_pages(keys: list[str], limit: int, **query: str) -> list[ListingPage]:
    pages = [list_page(keys, start="", limit=limit, **query)]
    while (start := pages[-1].next_start) is not None:
        pages.append(list_page(keys, start=start, limit=limit, **query))
        assert len(pages) <= len(keys) + 1
    return pages


@given(_KEYS, st.text(st.sampled_from("ab/é"), max_size=3), st.sampled_from(["", "/", "\U0010ffff"]), st.integers(1, 5))
def test_pages_together_are_the_whole_listing_in_order(keys: set[str], prefix: str, delimiter: str, limit: int) -> None:
    listed = sorted(keys)
    whole: list[tuple[str, bool]] = []
    for key in (key for key in listed if key.startswith(prefix)):
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        entry = (prefix + head + found, True) if found else (key, False)
        if entry not in whole:
            whole.append(entry)

    pages = _all_pages(listed, limit, prefix=prefix, delimiter=delimiter)

    assert [k for page in pages for k in page.keys] == [k for k, common in whole if not common]
    assert [p for page in pages for p in page.prefixes] == [k for k, common in whole if common]
    assert all(len(page.keys) + len(page.prefixes) == limit for page in pages[:-1])


@given(_KEYS)
def test_keys_ascend_as_their_utf8_bytes_do(keys: set[str]) -> None:
    page = list_page(sorted(keys), prefix="", limit=100)
    assert list(page.keys) == sorted(keys, key=str.encode)


def test_a_start_within_a_common_prefix_still_lists_it() -> None:
    page = list_page(["a/1", "a/2", "b"], prefix="", delimiter="/", start="a/2", limit=10)
    assert (page.keys, page.prefixes) == (("b",), ("a/",))


def test_a_page_of_nothing_claims_no_next_page() -> None:
    assert list_page(["a"], prefix="", limit=0) == ListingPage(keys=(), prefixes=(), next_start=None)
