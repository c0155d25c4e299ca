"""The documents' own training programs, each run by a test on the tiny model."""
