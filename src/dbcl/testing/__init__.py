"""Contract suites for people who write a sketch or an engine of their own."""
