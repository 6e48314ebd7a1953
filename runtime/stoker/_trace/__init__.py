"""Traces of waits, fetches and requests: writing, reading, drawing and export."""
