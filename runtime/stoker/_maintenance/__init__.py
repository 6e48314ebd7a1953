"""Looking after a data set: verify it, rebuild a lost manifest, collect garbage, remove it."""

from stoker._maintenance.garbage import GarbageReport, Removal, Unfinished, gc, plan_removal, remove
from stoker._maintenance.inspection import BadObject, verify
from stoker._maintenance.recovery import RebuildReport, rebuild_manifest

__all__ = [
    "BadObject",
    "GarbageReport",
    "RebuildReport",
    "Removal",
    "Unfinished",
    "gc",
    "plan_removal",
    "rebuild_manifest",
    "remove",
    "verify",
]
