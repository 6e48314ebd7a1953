"""The cost of reading a super-sample from each tier and store, compared with a plain TCP copy of the same bytes."""
