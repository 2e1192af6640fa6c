"""The tables and figures of the paper, and ours beside them: one file each, played by `python -m experiments`.

`registry.py` lists them. `experiment.py` says what an experiment is, `rows.py` keeps what was played, `runner.py` plays
the jobs that are left and writes the report.
"""
