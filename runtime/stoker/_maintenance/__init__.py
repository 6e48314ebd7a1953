"""Looking after a data set: verify it, rebuild a lost manifest, collect garbage, remove it."""

from stoker._maintenance.garbage import GarbageReport, Unfinished, gc
from stoker._maintenance.inspection import BadObject, verify
from stoker._maintenance.recovery import RebuildReport, rebuild_manifest
from stoker._maintenance.removal import Removal, plan_removal, remove

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
