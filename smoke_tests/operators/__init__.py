"""The fused operators: the table of implementations, the references that they are compared with, and the bounds."""
