"""Models assembled from the table of fused operators, and their training."""
