"""How a rank's samples come into memory: one protocol, and two ways.

:mod:`~stoker.reading.super_samples` reads whole super-samples, or the wanted columns of them;
:mod:`~stoker.reading.groups` reads groups of samples from anywhere, range by range. What is delivered is the same.
"""
