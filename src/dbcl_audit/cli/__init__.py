"""The commands `dbcl audit` and `dbcl compare`, which `dbcl` finds by their entry points."""
