"""Packing: samples in, super-samples in a store, and a manifest at the very end; resumable after a kill at any point.

:mod:`~stoker._pack.packer` is the face; :mod:`~stoker._pack.plan` decides which run a pack is,
:mod:`~stoker._pack.cutter` where super-samples end, :mod:`~stoker._pack.record` and
:mod:`~stoker._pack.log` what is known of a run after a kill.
"""
