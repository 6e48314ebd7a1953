"""How jobs share a cluster's cache and its way to the bucket."""
