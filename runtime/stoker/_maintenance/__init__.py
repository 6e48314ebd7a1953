"""Looking after a data set: verify it, rebuild a lost manifest, collect garbage, remove it."""
