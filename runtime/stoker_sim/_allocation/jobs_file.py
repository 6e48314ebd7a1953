"""Jobs and the cluster that they share, as a TOML file describes them; every field is in ``docs/allocation.md``."""

from __future__ import annotations

from pathlib import Path

from stoker._base.sizes import MOST_BYTES, parse_rate
from stoker._order.order import MAX_LANES
from stoker.errors import ConfigError
from stoker_sim._allocation.allocation import Cluster, Job
from stoker_sim._scenarios.section import Section, read_section

__all__ = ["read_jobs"]

_MOST_SAMPLES_PER_SECOND = 1e12


def read_jobs(path: Path, *, cache_bytes: int | None, bytes_per_second: float | None) -> tuple[list[Job], Cluster]:
    """Read a file of jobs.

    Args:
        path: of it.
        cache_bytes: of the cluster, in place of the file's,
        bytes_per_second: and so here.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown or out of bounds; names the job and it.
    """
    top = read_section(path)
    cluster = top.within("cluster")
    if cache_bytes is None or "cache_bytes" in cluster:
        given_bytes = cluster.size("cache_bytes")
        cache_bytes = given_bytes if cache_bytes is None else cache_bytes
    if bytes_per_second is None or "bandwidth" in cluster:
        given_rate = _rate(cluster, "bandwidth")
        bytes_per_second = given_rate if bytes_per_second is None else bytes_per_second
    cluster.end()
    jobs = [_job(section) for section in top.each("jobs")]
    top.end()
    if not jobs:
        raise ConfigError(f"{path} has no jobs; describe each in a table [[jobs]]")
    return jobs, Cluster(cache_bytes=cache_bytes, bytes_per_second=bytes_per_second)


def _job(section: Section) -> Job:
    name = section.text("name")
    try:
        dataset_bytes = section.size("dataset_bytes")
        dataset = section.text("dataset") if "dataset" in section else None
        nodes, rate = section.integer("nodes", 1, most=MAX_LANES), _compute_rate(section)
        return section.checked(
            Job,
            name=name,
            dataset=dataset,
            dataset_bytes=dataset_bytes,
            compute_bytes_per_second=rate,
            nodes=nodes,
        )
    except ConfigError as error:
        raise ConfigError(f"{error} (the job {name!r})") from None


def _compute_rate(section: Section) -> float:
    """Return what a job trains a second, which a person may know in bytes or in samples."""
    if "samples_per_second" in section:
        if "compute" in section:
            raise section.wrong("compute", section.text("compute"), "left out, as it must be beside samples_per_second")
        return section.number("samples_per_second", most=_MOST_SAMPLES_PER_SECOND) * section.size("sample_bytes")
    return _rate(section, "compute")


def _rate(section: Section, name: str) -> float:
    text = section.text(name)
    try:
        if (rate := parse_rate(text)) <= MOST_BYTES:
            return rate
    except ConfigError:
        raise section.wrong(name, text, 'a rate such as "10Gbit" or "400MB/s"') from None
    raise section.wrong(name, text, f"a rate of at most {MOST_BYTES} bytes a second")
