"""Store URLs, and the checks of keys, ranges and conditions that all adapters share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stoker._base.fields import make_printable
from stoker._base.plugins import plugin_names
from stoker._stores.options import check_endpoint, is_loopback
from stoker.abc import ObjectInfo
from stoker.errors import ConfigError, ObjectChangedError, RangeBeyondEndError, StoreError

STORE_ENTRY_POINTS = "stoker.stores"
"""Entry point group of functions that open stores, by URL scheme."""

_BUCKET_SCHEMES = ("s3", "gs", "memory")
_SERVED_SCHEMES = ("stoker+https", "stoker+http")
_SERVED_PATH = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._~-]*/)*[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_BUCKET_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_URL_LIKE = re.compile(r"[\w+.-]+:/")
_WITHOUT_SLASHES = re.compile(r"(?:s3|gs|memory|file|https?|stoker\+https?):", re.ASCII | re.IGNORECASE)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # a lone UTF-16 surrogate, which is no character
_MAX_KEY_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A parsed store URL.

    Attributes:
        url: URL as the user wrote it, without trailing slashes; for messages.
        scheme: ``file``, ``s3``, ``gs``, ``memory``, ``stoker+https``, ``stoker+http``, or the scheme of a plug-in.
        bucket: Name of the bucket; for ``file``, the absolute path of the folder; for ``stoker+http(s)``, host and
            port; for a plug-in, the text before the first slash.
        prefix: Prefix of every key, without slashes at either end; always empty for ``file``.
    """

    url: str
    scheme: str
    bucket: str
    prefix: str = ""

    @property
    def canonical_url(self) -> str:
        """Canonical form for comparing locations: ends with a slash, and is a prefix of all locations below it.

        Symbolic links in the path of a folder are resolved.
        """
        if self.scheme == "file":
            return f"{Path(self.bucket).resolve()}/".replace("//", "/")
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/") + "/"

    def object_url(self, key: str) -> str:
        """Return the address of an object, for messages."""
        return make_printable(f"{self.url}/{key}")

    def full_key(self, key: str) -> str:
        """Return the key within the bucket for a key within the store, which is checked."""
        check_key(key)
        return self.within_bucket(key)

    def within_bucket(self, key_or_prefix: str) -> str:
        """Return the key or key prefix within the bucket for one within the store.

        Raises:
            ConfigError: The text is not valid Unicode.
        """
        check_text("object key or prefix", key_or_prefix)
        return f"{self.prefix}/{key_or_prefix}" if self.prefix else key_or_prefix

    def relative(self, full_key: str) -> str:
        """Return the key within the store for a key within the bucket; the inverse of :meth:`within_bucket`.

        Raises:
            StoreError: The bucket listed a key that lacks the prefix, or is not valid text.
        """
        before = f"{self.prefix}/" if self.prefix else ""
        if not full_key.startswith(before) or _LONE_SURROGATE.search(full_key):
            raise StoreError(f"{self.url}: the bucket lists the key {full_key[:64]!r}, which is not below this URL")
        return full_key[len(before) :]


def parse_url(url: str | os.PathLike[str]) -> Location:
    """Parse ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``memory://name/prefix``, ``file:///folder`` or a path.

    Bucket prefixes are literal (``%20`` is three characters); ``file`` URLs are percent-decoded. A data set that a
    function serves has a URL ``stoker+https://host/v1/name``. Any other scheme must be the name of an entry point in
    the group ``stoker.stores``, and its plug-in interprets the rest of the URL.

    Raises:
        ConfigError: The URL is not one of these.
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise ConfigError("a store URL is empty or holds a NUL character; give a path or s3://bucket/prefix")
    if "://" not in text:
        _check_slashes(text)
        return Location(url=text.rstrip("/") or "/", scheme="file", bucket=str(Path(text).absolute()))
    scheme, rest = text.split("://", 1)
    if scheme == "file":
        return _parse_file_url(text)
    if scheme in _SERVED_SCHEMES:
        return _parse_served_url(text)
    bucket, _, prefix = rest.partition("/")
    if scheme not in _BUCKET_SCHEMES:
        _check_plugin(scheme, bucket)
        return Location(url=text.rstrip("/"), scheme=scheme, bucket=bucket, prefix=prefix.strip("/"))
    if bucket.startswith("arn:"):
        raise ConfigError(
            "stoker does not accept ARNs of access points; give the access point's alias (it ends in -s3alias) or "
            "the bucket's name, as in s3://bucket/prefix"
        )
    if "@" in bucket or ":" in bucket:
        # The text before the @ may be a secret, so the message does not show the URL.
        raise ConfigError(
            f"a {scheme}:// URL holds a user, password or port; give credentials and endpoints as options"
        )
    if not _BUCKET_NAME.fullmatch(bucket):
        raise ConfigError(f"{text!r} names no bucket; write {scheme}://bucket/prefix")
    check_text("the prefix in a store URL", prefix)
    return Location(url=text.rstrip("/"), scheme=scheme, bucket=bucket, prefix=prefix.strip("/"))


def is_url_like(text: str) -> bool:
    """Return whether a text begins like a URL, with a scheme, a colon and a slash, and not like a path."""
    return _URL_LIKE.match(text) is not None


def _check_slashes(path: str) -> None:
    """Raise ConfigError for ``s3:/bucket/prefix`` and ``s3:bucket/prefix``, which are misspelled URLs and not folders.

    The message shows the scheme only, since the rest may hold a secret.
    """
    if is_url_like(path) or _WITHOUT_SLASHES.match(path):
        scheme, _, rest = path.partition(":")
        slashes = "/" * (len(rest) - len(rest.lstrip("/")))
        meant = "file:///folder" if scheme == "file" else f"{scheme}://bucket/prefix"
        raise ConfigError(
            f"a URL that begins with {f'{scheme}:{slashes}'!r:.80} lacks a slash; write {meant:.80} as a string, "
            "since pathlib.Path removes a slash. For a local folder of that name, write ./ before it"
        )


def _check_plugin(scheme: str, authority: str) -> None:
    """Raise ConfigError if no plug-in is installed for a scheme, or its URL holds a user or password."""
    if scheme not in (installed := plugin_names(STORE_ENTRY_POINTS)):
        others = "".join(f"{name}://, " for name in installed)
        raise ConfigError(
            f"stoker has no store for {make_printable(scheme[:40])}:// URLs; use s3://, gs://, file://, memory://, "
            f"{others}or a path, and stoker+https:// for a data set that a function serves; packages add schemes by "
            f"entry points in the group {STORE_ENTRY_POINTS}"
        )
    if "@" in authority:
        raise ConfigError(f"a {scheme}:// URL holds a user or password, which every message would show; remove it")


def _parse_file_url(url: str) -> Location:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError("a file:// URL holds a user or password; write file:///folder, or the plain path")
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise ConfigError(
            f"{url!r} is not a local folder; write file:///folder ('?' and '#' percent-encoded), or the plain path"
        )
    return Location(url=url.rstrip("/"), scheme="file", bucket=str(Path(unquote(parts.path)).absolute()))


def _parse_served_url(url: str) -> Location:
    """Parse the URL of a data set that a function serves; messages do not show it, since it may hold a secret."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.rstrip("/").partition("/")
    check_endpoint(f"{scheme.removeprefix('stoker+')}://{authority}", f"the host in a {scheme}:// URL")
    if not _SERVED_PATH.fullmatch(path):
        raise ConfigError(f"a {scheme}:// URL names no data set; write {scheme}://host/v1/name, with nothing after it")
    if scheme == "stoker+http" and not is_loopback(urlsplit(f"http://{authority}").hostname or ""):
        raise ConfigError("stoker+http:// is for this machine only, since it sends the token unencrypted; use https")
    return Location(url=url.rstrip("/"), scheme=scheme, bucket=authority, prefix=path)


def check_text(name: str, text: str) -> None:
    """Raise ConfigError if ``text`` holds a lone surrogate, which UTF-8 cannot encode."""
    if _LONE_SURROGATE.search(text):
        raise ConfigError(f"{name} {text!r} is not valid Unicode text")


def check_key(key: str) -> None:
    """Raise ConfigError unless ``key`` can name an object in a bucket."""
    check_text("object key", key)
    size_bytes = len(key.encode())
    if not key or key.startswith("/") or "\0" in key:
        raise ConfigError(f"object key {key!r} is empty, starts with '/' or holds a NUL character")
    if size_bytes > _MAX_KEY_BYTES:
        raise ConfigError(f"object key {key[:64]!r}… has {size_bytes} bytes, more than a bucket's {_MAX_KEY_BYTES}")


def check_range(start: int, end: int, into: memoryview) -> None:
    """Raise ConfigError unless ``[start, end)`` is a range and ``into`` has exactly its size."""
    if not 0 <= start <= end:
        raise ConfigError(f"byte range [{start}, {end}) is negative or reversed")
    if into.readonly or into.itemsize != 1 or into.ndim != 1 or not into.contiguous:
        raise ConfigError("'into' must be a writable, contiguous, one-dimensional memoryview of bytes")
    if into.nbytes != end - start:
        raise ConfigError(f"'into' has {into.nbytes} bytes, and range [{start}, {end}) has {end - start}")


def check_tag_and_range(address: str, info: ObjectInfo, start: int, end: int, tag: str | None) -> ObjectInfo:
    """Return ``info`` if the object has the ``tag`` and the range ``[start, end)``.

    Raises:
        ObjectChangedError: The object has another tag.
        RangeBeyondEndError: The object ends before the range does.
    """
    if tag not in (None, info.tag):
        raise ObjectChangedError(f"{address} was overwritten: its tag is no longer {tag}")
    if end > info.size_bytes:
        raise RangeBeyondEndError(f"{address} has {info.size_bytes} bytes; range [{start}, {end}) goes beyond its end")
    return info


def check_conditions(*, if_absent: bool, if_tag: str | None) -> None:
    """Raise ConfigError if a write has both conditions: that no object exists, and that one with a tag does."""
    if if_absent and if_tag is not None:
        raise ConfigError("if_absent and if_tag are mutually exclusive; give at most one of them")
