"""The storage format: schemas, super-samples, manifests and manifest versions."""
