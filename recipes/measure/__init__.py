"""Numbers: rows that smoke_tests/bench/ measures, what they come to, and what they say of the documents."""
