"""Functions on this machine: what packing takes, how long an invocation does, and how far they scale."""
