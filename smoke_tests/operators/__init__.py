"""The fused operators: the table of their implementations, what they are compared with, and within which bounds."""
