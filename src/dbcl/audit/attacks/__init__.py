"""The attacks of an audit; each reads transcripts and gives findings."""
