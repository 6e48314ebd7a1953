"""Bytes at rest: columns, super-samples, manifests and their versions."""
