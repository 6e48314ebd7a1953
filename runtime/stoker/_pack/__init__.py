"""Packs samples into super-samples and commits a manifest at the end; resumable after a kill at any point.

:mod:`~stoker._pack.packer` has the public classes; :mod:`~stoker._pack.plan` decides whether a pack starts or resumes a
run, :mod:`~stoker._pack.run` performs it, and :mod:`~stoker._pack.record` stores what is needed to resume it. A
:mod:`~stoker._pack.catalog` keeps the runs that functions packed until :mod:`~stoker._pack.merge` commits them.
"""
