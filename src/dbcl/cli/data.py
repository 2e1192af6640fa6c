"""`dbcl data` lists the datasets on this machine; `dbcl data fetch` downloads a dataset."""

from typing import Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from dbcl import data as datasets
from dbcl.cli.console import AsJson, console, print_json, table
from dbcl.cli.options import DataDir
from dbcl.errors import DbclError


def data(context: typer.Context, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the datasets on this machine, or fetch one.

    Examples:

      dbcl data
      dbcl data fetch mnist
    """
    if context.invoked_subcommand:
        context.obj = data_dir
        return
    rows = []
    for name in datasets.LOADERS:
        try:
            found = datasets.load(name, data_dir)
        except DbclError as error:
            rows.append({"name": name, "here": False, "what": str(error)})
            continue
        size = f"{len(found.y_train):,} to learn from, {len(found.y_test):,} held out, each {found.shape}"
        rows.append({"name": name, "here": True, "what": size})
    folder = datasets.data_root(data_dir)
    if as_json:
        print_json({"folder": str(folder), "datasets": rows})
        return
    cells = [(str(row["name"]), "yes" if row["here"] else "no", str(row["what"])) for row in rows]
    console.print(table(f"datasets under {folder}", ("name", "here", "what"), cells))


def fetch(context: typer.Context, name: str, data_dir: DataDir = None) -> None:
    """Download a dataset, mnist or cifar10, from its official address, check it, and keep it under the data folder."""
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as progress:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, size: int) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=size or None)
            progress.update(tasks[file], completed=done)

        for path in datasets.fetch(name, datasets.data_root(data_dir or context.obj), progress=show):
            progress.console.print(f"here: {path}", soft_wrap=True)
