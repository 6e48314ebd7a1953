"""What is wrong between this machine, a bucket and a data set, and what to do about it."""
