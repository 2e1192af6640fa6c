"""Keep pytest from importing Sphinx's configuration, which needs the extra `docs`."""

collect_ignore = ["conf.py"]
