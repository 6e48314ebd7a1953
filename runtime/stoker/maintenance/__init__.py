"""Looking after a data set: verify it, rebuild a lost manifest, collect garbage."""

from stoker.maintenance.garbage import GarbageReport, Unfinished, gc
from stoker.maintenance.inspection import BadObject, verify
from stoker.maintenance.recovery import RebuildReport, rebuild_manifest

__all__ = ["BadObject", "GarbageReport", "RebuildReport", "Unfinished", "gc", "rebuild_manifest", "verify"]
