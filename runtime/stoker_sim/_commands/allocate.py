"""``stoker allocate``: divide a cluster's cache and its bandwidth from the bucket among jobs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from stoker._base.sizes import MAX_BYTES, parse_rate
from stoker._order.order import MAX_LANES
from stoker.cli.flags import add_json, rate_from, size
from stoker.cli.output import json_text, make_printable, table
from stoker.errors import ConfigError
from stoker_sim._allocation import POLICIES, Allocation, Cluster, JobShare, TrainingJob, allocate
from stoker_sim._scenario_file import TomlSection, read_section

_POLICY_NAMES = [name for name in POLICIES if name != "no-cache"]
_MEGABYTE = 10**6
_FOLDER = "/mnt/nvme/stoker"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("jobs", type=Path, metavar="JOBS.toml", help="file that describes the jobs and their cluster")
    parser.add_argument("--cache", type=size, metavar="SIZE", help="cache of all nodes together (default: the file's)")
    rate = "bandwidth from the bucket, such as 10Gbit (default: the file's)"
    parser.add_argument("--bandwidth", type=rate_from(0.0), metavar="RATE", help=rate)
    policy = "maximize the total rate, the smallest share of a job's full rate, or divide equally (default: greedy)"
    parser.add_argument("--policy", choices=_POLICY_NAMES, default="greedy", help=policy)
    add_json(parser)
    parser.set_defaults(example="stoker allocate jobs.toml --cache 2TB --policy max-min")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    jobs, cluster = read_jobs(args.jobs, cache_bytes=args.cache, bytes_per_second=args.bandwidth)
    allocation = allocate(jobs, cluster, POLICIES[args.policy])
    if args.json:
        print(json_text(_as_json(allocation, cluster, args.policy)))
    else:
        print(_as_text(allocation, cluster, args.policy))
    return 0


def _limit_bytes(share: JobShare) -> int:
    """Return the cache of the job's data set on one node, in bytes, a whole number of megabytes.

    Jobs that share a data set share this cache: the first one fills it and the others read it.
    """
    return share.cache_bytes // share.job.nodes // _MEGABYTE * _MEGABYTE


def _cache_settings(share: JobShare) -> dict[str, str | None]:
    """Return the values of the Loader's arguments ``cache`` and ``cluster``; None for what is not used."""
    limit_bytes = _limit_bytes(share)
    setting = f"disk:{_FOLDER}?limit={limit_bytes // _MEGABYTE}MB" if limit_bytes else None
    shared = share.job.shares_caches
    return {"cache": None if shared else setting, "cluster": setting if shared else None}


def _max_bytes_per_second(share: JobShare) -> int | None:
    """Return ``max_bytes_per_second`` for the FetchConfig of a node's only rank; None if nothing is allocated."""
    return int(share.bytes_per_second / share.job.nodes) or None


def _format_settings(share: JobShare) -> str:
    """Return the Loader call of a job, or an empty string if it has no settings."""
    settings = [f'{name}="{setting}"' for name, setting in _cache_settings(share).items() if setting]
    settings += [f"fetch=FetchConfig(max_bytes_per_second={rate})"] if (rate := _max_bytes_per_second(share)) else []
    return f"Loader(…, {', '.join(settings)})" if settings else ""


def _bound_name(share: JobShare) -> str:
    return "compute" if share.is_compute_bound else "I/O"


def _as_json(allocation: Allocation, cluster: Cluster, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "cluster": {"cache_bytes": cluster.cache_bytes, "bytes_per_second": cluster.bytes_per_second},
        "jobs": [
            {
                "name": share.job.name,
                "dataset": share.job.dataset,
                "nodes": share.job.nodes,
                "cache_bytes": share.cache_bytes,
                "limit_bytes": _limit_bytes(share),
                "max_bytes_per_second": _max_bytes_per_second(share),
                "bytes_per_second": share.bytes_per_second,
                "hit_rate": share.hit_rate,
                "rate_bytes_per_second": share.rate,
                "compute_bytes_per_second": share.job.compute_bytes_per_second,
                "bound": _bound_name(share),
                **_cache_settings(share),
            }
            for share in allocation.shares
        ],
        "total": {
            "cache_bytes": allocation.cache_bytes,
            "bytes_per_second": allocation.bytes_per_second,
            "rate_bytes_per_second": allocation.rate,
            "compute_bytes_per_second": _full_rate(allocation),
        },
    }


def _full_rate(allocation: Allocation) -> float:
    return sum(share.job.compute_bytes_per_second for share in allocation.shares)


def _as_text(allocation: Allocation, cluster: Cluster, policy: str) -> str:
    rows = [("job", "cache", "hits", "bandwidth", "trains", "of full rate", "bound")]
    for share in allocation.shares:
        full = share.job.compute_bytes_per_second
        cells = (
            _format_bytes(share.cache_bytes),
            f"{share.hit_rate:.0%}",
            *_format_rates(share.bytes_per_second, share.rate, full),
        )
        rows.append((make_printable(share.job.name), *cells, _bound_name(share)))
    total = (
        _format_bytes(allocation.cache_bytes),
        "",
        *_format_rates(allocation.bytes_per_second, allocation.rate, _full_rate(allocation)),
    )
    rows.append(("total", *total, ""))
    rows.append(
        ("of", _format_bytes(cluster.cache_bytes), "", f"{_format_bytes(cluster.bytes_per_second)}/s", "", "", "")
    )
    lines = [f"{policy}: from the second epoch on", table(rows)]
    named = [(make_printable(share.job.name), text) for share in allocation.shares if (text := _format_settings(share))]
    if named:
        lines += ["settings of each job, if a node has one rank", table(named)]
    idle = [make_printable(share.job.name) for share in allocation.shares if not share.rate]
    if idle and policy == "greedy" and cluster.bytes_per_second:
        lines.append(f"nothing is left for {', '.join(idle)}; with --policy max-min all jobs train")
    return "\n".join(lines)


def _format_rates(bytes_per_second: float, rate: float, full: float) -> tuple[str, str, str]:
    return f"{_format_bytes(bytes_per_second)}/s", f"{_format_bytes(rate)}/s", f"{rate / full:.0%}"


def _format_bytes(size_bytes: float) -> str:
    """Format a size with decimal units, as is usual for disks and networks."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.3g} TB" if size_bytes < 999.5 else f"{size_bytes:,.0f} TB"


_MAX_SAMPLES_PER_SECOND = 1e12


def read_jobs(
    path: Path, *, cache_bytes: int | None, bytes_per_second: float | None
) -> tuple[list[TrainingJob], Cluster]:
    """Read a file of jobs.

    Args:
        path: TOML file of the jobs and the cluster.
        cache_bytes: cache of the cluster, in bytes; None takes the file's.
        bytes_per_second: bandwidth of the cluster from the bucket; None takes the file's.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown or out of bounds; names job and field.
    """
    top = read_section(path)
    cluster = top.section("cluster")
    size_bytes = cluster.size("cache_bytes", cache_bytes)
    rate = _parse_rate(cluster, "bandwidth", bytes_per_second)
    cluster.reject_unread()
    jobs = [_parse_job(section) for section in top.sections("jobs")]
    top.reject_unread()
    if not jobs:
        raise ConfigError(f"{path} has no jobs: describe each one in a [[jobs]] table")
    return jobs, Cluster(
        cache_bytes=size_bytes if cache_bytes is None else cache_bytes,
        bytes_per_second=rate if bytes_per_second is None else bytes_per_second,
    )


def _parse_job(section: TomlSection) -> TrainingJob:
    name = section.text("name")
    try:
        dataset_bytes = section.size("dataset_bytes")
        dataset = section.text("dataset") if "dataset" in section else None
        nodes = section.integer("nodes", 1, max_value=MAX_LANES)
        cache = section.choice("cache", ("disk", "cluster"), "disk")
        rate = _parse_compute_rate(section)
        return section.create(
            TrainingJob,
            name=name,
            dataset=dataset,
            dataset_bytes=dataset_bytes,
            compute_bytes_per_second=rate,
            nodes=nodes,
            shares_caches=cache == "cluster",
        )
    except ConfigError as error:
        raise ConfigError(f"{error} (the job {name!r})") from None


def _parse_compute_rate(section: TomlSection) -> float:
    """Return the rate at which a job trains, in bytes a second, given in bytes or in samples."""
    if "samples_per_second" in section:
        if "compute" in section:
            raise section.error("compute and samples_per_second both give the rate of training; give one of them")
        return section.number("samples_per_second", max_value=_MAX_SAMPLES_PER_SECOND) * section.size("sample_bytes")
    return _parse_rate(section, "compute")


def _parse_rate(section: TomlSection, name: str, default: float | None = None) -> float:
    if default is not None and name not in section:
        return default
    text = section.text(name)
    try:
        if (rate := parse_rate(text)) <= MAX_BYTES:
            return rate
    except ConfigError:
        raise section.invalid_value(name, text, 'a rate such as "10Gbit" or "400MB/s"') from None
    raise section.invalid_value(name, text, f"a rate of at most {MAX_BYTES} bytes a second")
