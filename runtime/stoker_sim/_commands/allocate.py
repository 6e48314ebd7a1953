"""``stoker allocate``: divide a cluster's cache and its way to the bucket among jobs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from stoker.cli.flags import rate_from, size
from stoker.cli.output import json_text, printable, table
from stoker_sim._allocation import POLICIES, Allocation, Cluster, Share, allocate, read_jobs

__all__ = ["configure", "run"]

_OFFERED = [name for name in POLICIES if name != "no-cache"]
_MEGABYTE = 10**6
_FOLDER = "/mnt/nvme/stoker"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("jobs", type=Path, metavar="JOBS.toml", help="of the jobs and the cluster that they share")
    parser.add_argument("--cache", type=size, metavar="SIZE", help="on all nodes together (default: as the file says)")
    rate = "from the bucket, such as 10Gbit (default: as the file says)"
    parser.add_argument("--bandwidth", type=rate_from(0.0), metavar="RATE", help=rate)
    policy = "the most in all, the same part of its full rate for every job, or equal parts (default: greedy)"
    parser.add_argument("--policy", choices=_OFFERED, default="greedy", help=policy)
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    jobs, cluster = read_jobs(args.jobs, cache_bytes=args.cache, bytes_per_second=args.bandwidth)
    found = allocate(jobs, cluster, POLICIES[args.policy])
    if args.json:
        print(json_text(_as_json(found, cluster, args.policy)))
    else:
        print(_as_text(found, cluster, args.policy))
    return 0


def _limit(share: Share) -> int:
    """Return what the data set has on one node, in whole megabytes.

    Of jobs that share it, the one that starts first writes as much, and the others read that: none has a part.
    """
    return share.cache_bytes // share.job.nodes // _MEGABYTE * _MEGABYTE


def _cache(share: Share) -> str | None:
    """Return what to give to the Loader as ``cache``."""
    limit_bytes = _limit(share)
    return f"disk:{_FOLDER}?limit={limit_bytes // _MEGABYTE}MB" if limit_bytes else None


def _rate(share: Share) -> int | None:
    """Return what to give to the FetchConfig of a node's only rank, in bytes a second; None if nothing is allocated."""
    return int(share.bytes_per_second / share.job.nodes) or None


def _settings(share: Share) -> str:
    """Return what to write for a job; empty if nothing is."""
    settings = [f'cache="{cache}"'] if (cache := _cache(share)) else []
    settings += [f"fetch=FetchConfig(max_bytes_per_second={rate})"] if (rate := _rate(share)) else []
    return f"Loader(…, {', '.join(settings)})" if settings else ""


def _bound(share: Share) -> str:
    return "compute" if share.is_compute_bound else "I/O"


def _as_json(found: Allocation, cluster: Cluster, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "cluster": {"cache_bytes": cluster.cache_bytes, "bytes_per_second": cluster.bytes_per_second},
        "jobs": [
            {
                "name": share.job.name,
                "dataset": share.job.dataset,
                "nodes": share.job.nodes,
                "cache_bytes": share.cache_bytes,
                "limit_bytes": _limit(share),
                "max_bytes_per_second": _rate(share),
                "bytes_per_second": share.bytes_per_second,
                "hit_rate": share.hit_rate,
                "rate_bytes_per_second": share.rate,
                "compute_bytes_per_second": share.job.compute_bytes_per_second,
                "bound": _bound(share),
                "cache": _cache(share),
            }
            for share in found.shares
        ],
        "total": {
            "cache_bytes": found.cache_bytes,
            "bytes_per_second": found.bytes_per_second,
            "rate_bytes_per_second": found.rate,
            "compute_bytes_per_second": _full(found),
        },
    }


def _full(found: Allocation) -> float:
    return sum(share.job.compute_bytes_per_second for share in found.shares)


def _as_text(found: Allocation, cluster: Cluster, policy: str) -> str:
    rows = [("job", "cache", "hits", "bandwidth", "trains", "of full rate", "bound")]
    for share in found.shares:
        full = share.job.compute_bytes_per_second
        shown = (_bytes(share.cache_bytes), f"{share.hit_rate:.0%}", *_rates(share.bytes_per_second, share.rate, full))
        rows.append((printable(share.job.name), *shown, _bound(share)))
    in_all = _bytes(found.cache_bytes), "", *_rates(found.bytes_per_second, found.rate, _full(found))
    rows.append(("in all", *in_all, ""))
    rows.append(("of", _bytes(cluster.cache_bytes), "", f"{_bytes(cluster.bytes_per_second)}/s", "", "", ""))
    lines = [f"{policy}: from the second epoch on", table(rows)]
    named = [(printable(share.job.name), text) for share in found.shares if (text := _settings(share))]
    if named:
        lines += ["what to write, where a node has one rank", table(named)]
    idle = [printable(share.job.name) for share in found.shares if not share.rate]
    if idle and policy == "greedy" and cluster.bytes_per_second:
        lines.append(f"nothing is left for {', '.join(idle)}; with --policy max-min all jobs train")
    return "\n".join(lines)


def _rates(bytes_per_second: float, rate: float, full: float) -> tuple[str, str, str]:
    return f"{_bytes(bytes_per_second)}/s", f"{_bytes(rate)}/s", f"{rate / full:.0%}"


def _bytes(size_bytes: float) -> str:
    """Return a size in powers of 1000, as disks, networks and the file's own figures are given."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.3g} TB" if size_bytes < 999.5 else f"{size_bytes:,.0f} TB"
