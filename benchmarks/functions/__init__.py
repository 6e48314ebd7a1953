"""Functions on this machine: cost of packing, latency of invocations, and scaling."""
