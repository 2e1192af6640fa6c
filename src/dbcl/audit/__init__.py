"""Attacks on our own runs: what each party could learn from what it saw."""
