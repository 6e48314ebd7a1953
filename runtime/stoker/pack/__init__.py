"""Packing: samples in, super-samples in a store, and a manifest at the very end; resumable after a kill at any point.

:mod:`~stoker.pack.packer` is the face; :mod:`~stoker.pack.plan` decides which run a pack is, :mod:`~stoker.pack.cutter`
where super-samples end, :mod:`~stoker.pack.record` and :mod:`~stoker.pack.log` what is known of a run after a kill.
"""
