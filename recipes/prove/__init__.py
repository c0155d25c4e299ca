"""What is proved: the claims' evidence, the patches' proofs, the planted faults, and what makes each of them stale."""
