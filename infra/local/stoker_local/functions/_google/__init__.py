"""Google Cloud Functions on this machine, by the real Functions Framework."""
