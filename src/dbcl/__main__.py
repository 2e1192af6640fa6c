"""`python -m dbcl` is the `dbcl` command."""

from dbcl.cli import main

if __name__ == "__main__":
    main()
