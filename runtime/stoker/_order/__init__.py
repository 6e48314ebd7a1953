"""The order of samples, its sharding over ranks and workers, and the steps of a rank: pure arithmetic."""
