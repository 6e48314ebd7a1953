"""A packed data set as read-only files, for programs that open files through fsspec: pandas, Dask, Arrow, Hugging Face.

The file system has the name ``stoker`` in fsspec, so programs need not import this module.

Example:
    >>> photos = DatasetFileSystem(
    ...     "s3://bucket/train", template="samples/{label}/{__id__:08d}.npy", content="image"
    ... )
    >>> photos.ls("samples/7", detail=False)[:2]
    ['samples/7/00000007.npy', 'samples/7/00000017.npy']
"""

from __future__ import annotations

import errno
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from stoker._base.arguments import explain_arguments
from stoker._fetch.config import FetchConfig
from stoker._files.packed import Entry, FileSettings, ReadAhead, open_files
from stoker._files.paths import OBJECTS
from stoker._stores import StoreOptions
from stoker.errors import ConfigError, MissingExtraError, StokerError

try:
    from fsspec import AbstractFileSystem
    from fsspec.spec import AbstractBufferedFile
    from fsspec.utils import tokenize
except ImportError as error:
    raise MissingExtraError("data sets as files need fsspec; pip install 'stoker[fsspec]'") from error

__all__ = ["DatasetFileSystem"]

_HINTS = {
    "columns": "a file is the value of one column; name it by content=",
    "storage_options": "settings of the bucket are given as options=, such as options=stoker.S3Options(…)",
}


@explain_arguments("the stoker file system", _HINTS)
class DatasetFileSystem(AbstractFileSystem):
    """A read-only fsspec file system that shows one version of a data set as files.

    ``samples/`` has a file for each sample, at the path that the template gives it, with the value of one column:
    values of ``Bytes`` and ``Text`` columns and one-dimensional arrays of ``uint8`` as they are, any other array as a
    ``.npy`` file. ``objects/`` has the super-samples themselves, at their keys. DIESEL (Wang et al., ICPP 2020) has
    such an interface, by FUSE.

    Opening a sample reads it whole, verified by its checksum; ``cat`` reads many samples concurrently. If the template
    names a column, the first look at ``samples/`` reads the columns of the template, of all samples, and no other;
    paths then take about 200 bytes a sample. The size of a file comes from the head of its super-sample, which is read
    for ``info`` and for listings with details, while ``find``, ``glob`` and ``walk`` read none if they return names.

    The version is that at the time of creation. A pickle holds the settings and the version, and keys only if
    ``options`` has them. It may be used from several threads, and from forked processes.

    Every method that writes raises an OSError with ``errno.EROFS``.

    Args:
        url: location of the data set, as for :class:`stoker.Dataset`.
        template: paths of samples, which begin with ``samples/``. ``{__id__}`` is the number of the sample, and other
            names are those of columns of text or of single numbers, with formats as in ``{__id__:08d}``;
            ``{label!c}`` is the name of the class if the column was packed with ``classes``. Slashes in text make
            folders. Default ``samples/{__id__:08d}``, with ``.txt`` or ``.npy`` if the files are text or arrays.
        content: name of the column whose values are the files; default the only one, or the only one of ``Bytes``.
        version: version of the manifest, from 1; default the newest.
        memory: memory per process, as for :class:`stoker.Dataset`, without the paths.
        options: connection settings of the bucket (``S3Options``, ``GcsOptions``).
        fetch: deadlines, retries, hedges and concurrency.
        fo: the location as fsspec gives it for a chained URL, ``stoker://samples/00000012::s3://bucket/train``.
        target_protocol: scheme of ``fo``, if it has none.
        target_options: options for fsspec's own file system of that scheme, which is not used; must be empty.

    Raises:
        ConfigError: a setting is invalid, or does not fit the columns. At the first use of ``samples/``: two samples
            have the same path, or the path of a sample is not one that a file can have.
        NotFoundError: the URL has no data set, or the data set has no such version.
        MemoryBudgetError: the memory is too small; the message names the smallest size that works.

    Example:
        >>> import numpy as np
        >>> photos = DatasetFileSystem("s3://bucket/train", content="image")
        >>> photos.find("samples")[:2], photos.size("samples/00000000.npy")
        (['samples/00000000.npy', 'samples/00000001.npy'], 320)
        >>> with photos.open("samples/00000007.npy") as file:
        ...     np.load(file).shape
        (8, 8, 3)
    """

    protocol = "stoker"
    cachable = False  # fsspec compares settings by their repr, which has no secrets

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        template: str | None = None,
        content: str | None = None,
        version: int | None = None,
        memory: int | str = "256MB",
        options: StoreOptions | None = None,
        fetch: FetchConfig | None = None,
        fo: str | os.PathLike[str] | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._files = open_files(
            FileSettings(
                url=_locate(url, fo, target_protocol, target_options),
                template=template,
                content=content,
                version=version,
                memory=memory,
                options=options,
                fetch=fetch,
            )
        )

    def __repr__(self) -> str:
        settings = self._files.settings
        return f"<{type(self).__name__} {settings.url} version {settings.version}: {self._files.template.text}>"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetFileSystem) and self._files.settings == other._files.settings

    def __hash__(self) -> int:
        return hash(self._files.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._files.settings
        names = ("template", "content", "version", "memory", "options", "fetch")
        return partial(type(self), **{name: getattr(settings, name) for name in names}), (settings.url,)

    @property
    def fsid(self) -> str:
        """Identity of the version of the data set."""
        return f"stoker-{self._files.manifest.dataset}-{self._files.manifest.version}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        found = super()._strip_protocol(path)
        return found if isinstance(found, list) else found.lstrip("/")

    def ukey(self, path: str) -> str:
        """Return a token of a file and its contents, for caches of files."""
        return str(tokenize(self.fsid, self._files.contents.name, self._find(path)))

    # Names and sizes.

    def _find(self, path: Any) -> Entry:
        name = self._strip_protocol(path)
        if (entry := self._files.find(name)) is None:
            raise FileNotFoundError(errno.ENOENT, f"{self} has no such file", name)
        return entry

    def _find_file(self, path: Any) -> Entry:
        entry = self._find(path)
        if entry.number is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), entry.path)
        return entry

    def _describe(self, entries: Iterable[Entry], *, with_sizes: bool = True) -> list[dict[str, Any]]:
        """Return fsspec's description of files and folders; without sizes, those of files are None."""
        entries = list(entries)
        files = [each for each in entries if each.number is not None]
        sizes: Iterator[int | None] = iter(self._files.sizes(files) if with_sizes else [None] * len(files))
        found: list[dict[str, Any]] = []
        for path, branch, number in entries:
            if number is None:
                found.append({"name": path, "size": 0, "type": "directory"})
            elif branch == OBJECTS:
                tag = self._files.manifest.rows.tag(number)
                found.append({"name": path, "size": next(sizes), "type": "file", "row": number, "tag": tag})
            else:
                found.append({"name": path, "size": next(sizes), "type": "file", "sample": number})
        return found

    def info(self, path: str, *, with_sizes: bool = True, **_: Any) -> dict[str, Any]:
        """Return ``name``, ``size`` in bytes and ``type`` of a file or folder, with its ``sample`` or ``row``."""
        return self._describe([self._find(path)], with_sizes=with_sizes)[0]

    def ls(self, path: str, detail: bool = True, *, with_sizes: bool = True, **_: Any) -> list[Any]:
        """Return the names in a folder, or with ``detail`` what :meth:`info` returns for each."""
        entry = self._find(path)
        entries = self._files.entries(entry) if entry.number is None else [entry]
        if not detail:
            return sorted(each.path for each in entries)
        return sorted(self._describe(entries, with_sizes=with_sizes), key=lambda each: str(each["name"]))

    def walk(self, path: str, *args: Any, **settings: Any) -> Iterator[Any]:
        """Yield each folder below a path with the names in it, as fsspec's other file systems do."""
        settings.setdefault("with_sizes", bool(settings.get("detail")))
        yield from super().walk(path, *args, **settings)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **settings: Any
    ) -> Any:
        """Return all files below a path."""
        settings.setdefault("with_sizes", detail)
        if self.isfile(path):
            found = self.info(path, with_sizes=settings["with_sizes"])
            return {found["name"]: found} if detail else [found["name"]]
        return super().find(path, maxdepth, withdirs, detail, **settings)

    def glob(self, path: str, maxdepth: int | None = None, *, detail: bool = False, **settings: Any) -> Any:
        """Return the files and folders that match a pattern."""
        names = super().glob(path, maxdepth, **{**settings, "with_sizes": False})
        if not detail:
            return names
        return dict(zip(names, self._describe(map(self._find, names)), strict=True))

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether there is a file or folder at a path."""
        return self._files.find(self._strip_protocol(path)) is not None

    def isfile(self, path: str) -> bool:
        """Return whether there is a file at a path."""
        entry = self._files.find(self._strip_protocol(path))
        return entry is not None and entry.number is not None

    def isdir(self, path: str) -> bool:
        """Return whether there is a folder at a path."""
        entry = self._files.find(self._strip_protocol(path))
        return entry is not None and entry.number is None

    # Contents.

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return a file, or the bytes of a slice of it."""
        entry = self._find_file(path)
        assert entry.number is not None  # noqa: S101 - for type checkers: it is a file
        if entry.branch != OBJECTS:
            return self._files.read_samples([entry.number])[0][start:end]
        first, behind, _step = slice(start, end).indices(self._files.sizes([entry])[0])
        return self._files.read_object(entry.number, first, max(first, behind))

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **settings: Any) -> Any:
        """Return a file, or path → file for several; samples are read concurrently.

        Args:
            path: path or pattern, or a list of them.
            recursive: whether to return all files below folders.
            on_error: ``"raise"``, or ``"omit"`` or ``"return"`` an exception in place of a file.
            settings: ``maxdepth`` of patterns and folders.
        """
        paths = self._expand(path, recursive=recursive, **settings)
        if isinstance(path, str | os.PathLike) and paths == [self._strip_protocol(path)] and self.isfile(paths[0]):
            return self.cat_file(paths[0])
        found = self._read_samples(paths) if on_error == "raise" else self._try_samples(paths)
        for each in paths:
            if each not in found and not (recursive and self.isdir(each)):
                try:
                    found[each] = self.cat_file(each)
                except (OSError, StokerError) as error:
                    if on_error == "raise":
                        raise
                    found[each] = error
        return {each: found[each] for each in paths if each in found and not self._is_left_out(found[each], on_error)}

    @staticmethod
    def _is_left_out(value: object, on_error: str) -> bool:
        return on_error == "omit" and isinstance(value, Exception)

    def get(self, rpath: Any, lpath: Any, *args: Any, **settings: Any) -> None:
        """Copy files to local ones, as fsspec's other file systems do; samples are read ahead, concurrently.

        Args:
            rpath: path or pattern of files or folders, or a list of paths.
            lpath: local path or folder, or a list of paths.
            args: as ``settings``.
            settings: ``recursive``, ``callback`` and ``maxdepth``.
        """
        recursive = bool(args[0] if args else settings.get("recursive", False))
        if isinstance(rpath, list) and isinstance(lpath, list):
            paths = [self._strip_protocol(each) for each in rpath]
        else:
            paths = self.expand_path(rpath, recursive=recursive, maxdepth=settings.get("maxdepth"))
        super().get(rpath, lpath, *args, **settings, ahead=ReadAhead(self._files, paths))

    def get_file(
        self, rpath: str, lpath: Any = None, *args: Any, ahead: ReadAhead | None = None, **settings: Any
    ) -> None:
        """Copy one file to a local one."""
        data = None if ahead is None else ahead.take(self._strip_protocol(rpath))
        super().get_file(rpath, lpath, *args, **settings, data=data)

    def _expand(self, path: Any, **settings: Any) -> list[str]:
        """Return the paths that paths and patterns stand for; that of a file stands for itself, with any characters."""
        given = [path] if isinstance(path, str | os.PathLike) else list(path)
        names = [self._strip_protocol(each) for each in given]
        files = [each for each in names if self.isfile(each)]
        others = [each for each in names if each not in set(files)]
        return sorted({*files, *(self.expand_path(others, **settings) if others else ())})

    def _read_samples(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return path → file of those paths that are samples, read together."""
        entries = [each for each in map(self._files.find, paths) if each is not None and each.branch != OBJECTS]
        numbers = {each.path: each.number for each in entries if each.number is not None}
        return dict(zip(numbers, self._files.read_samples(list(numbers.values())), strict=True)) if numbers else {}

    def _try_samples(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return what :meth:`_read_samples` does; nothing if one sample cannot be read, since others still can be."""
        try:
            return self._read_samples(paths)
        except (OSError, StokerError):
            return {}

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, *_: Any, **settings: Any) -> Any:
        if mode != "rb":
            if "x" in mode and self.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._refuse()
        entry = self._find_file(path)
        if entry.branch == OBJECTS:
            size = self._files.sizes([entry])[0]
            cache = {name: settings[name] for name in ("cache_type", "cache_options") if settings.get(name)}
            return AbstractBufferedFile(self, path, mode, block_size, size=size, **cache)
        data = self.cat_file(path) if settings.get("data") is None else settings["data"]
        return AbstractBufferedFile(self, path, size=len(data), cache_type="all", cache_options={"data": data})

    # What writes.

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, f"{self} is read-only; to write a data set, use stoker.Packer")

    mkdir = makedirs = rmdir = touch = pipe = pipe_file = put = put_file = _refuse
    cp_file = copy = mv = rm = rm_file = _rm = _refuse


# That of the constructor, since fsspec's metaclass takes any arguments.
_, *_parameters = inspect.signature(DatasetFileSystem.__init__).parameters.values()
DatasetFileSystem.__signature__ = inspect.Signature(_parameters)


def _locate(
    url: str | os.PathLike[str] | None,
    fo: str | os.PathLike[str] | None,
    protocol: str | None,
    options: Mapping[str, Any] | None,
) -> str:
    """Return the URL of the data set, which is given by itself or as the end of a chained URL.

    Raises:
        ConfigError: it is given twice or not at all, or has options for another file system.
    """
    if (url is None) == (fo is None):
        raise ConfigError(
            "the stoker file system needs one data set: give url='s3://bucket/train', or chain it, as in "
            "stoker://samples/00000012::s3://bucket/train"
        )
    place = fo if url is None else url
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(f"the data set of the stoker file system must be a path or URL, not {place!r:.80}")
    if options:
        raise ConfigError(
            f"fsspec's options of {protocol}:// ({', '.join(options)}) are not those of the store; "
            "give options=, such as options=stoker.S3Options(…), and no other file system between"
        )
    text = os.fspath(place)
    if url is not None or protocol in (None, "file", "local") or "://" in text:
        return text
    return f"{protocol}://{text.lstrip('/')}"
