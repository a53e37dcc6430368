"""Data parallelism: buckets of gradients, their reduction, and the weights gathered afterwards."""
