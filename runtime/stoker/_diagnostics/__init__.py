"""Diagnosis of this machine, a bucket and a data set, and measurement of a bucket."""
