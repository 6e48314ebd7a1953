"""Looking after a data set: verify it, rebuild a lost manifest, collect garbage."""

from stoker.maintenance.garbage import GarbageReport, gc
from stoker.maintenance.inspection import BadObject, verify
from stoker.maintenance.recovery import RebuildReport, rebuild_manifest

__all__ = ["BadObject", "GarbageReport", "RebuildReport", "gc", "rebuild_manifest", "verify"]
