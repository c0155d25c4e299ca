"""What is proved: the evidence of claims, the proofs of patches, the planted faults, and what has changed since."""
