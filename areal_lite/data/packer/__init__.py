"""Data packers: rows to workflow input, recorded sequences to training batches, one class per kind of model."""
