"""The data: targets, packages, limits, locks and patches, read from the checkout; nothing is fetched or run."""
