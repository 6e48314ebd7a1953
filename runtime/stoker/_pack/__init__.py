"""Packing: samples in, super-samples in a store, and a manifest at the very end; resumable after a kill at any point.

:mod:`~stoker._pack.packer` is the face; :mod:`~stoker._pack.plan` decides which run a pack is,
:mod:`~stoker._pack.run` carries it out, and :mod:`~stoker._pack.record` has what is known of a run after a
kill. Runs that functions packed are kept in a :mod:`~stoker._pack.catalog` until :mod:`~stoker._pack.merge` commits
them.
"""
