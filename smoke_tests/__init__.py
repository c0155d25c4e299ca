"""The claims about a target's packages, what proves them, and the evidence of their runs."""
