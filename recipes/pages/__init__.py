"""What is rendered from data and evidence: tables and pages in Markdown."""
