"""Many calls of functions at once; what users take of it is in :mod:`stoker.fanout`."""
