"""How buckets, disks, caches and platforms behave in virtual time."""
