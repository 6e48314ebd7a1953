"""What a read of a super-sample takes from each place that may hold it, beside a plain TCP copy of the same bytes."""
