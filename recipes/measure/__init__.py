"""Numbers: the rows that smoke_tests/bench/ measures, the results, and the documents' statements that they answer."""
