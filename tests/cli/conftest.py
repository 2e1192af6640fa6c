from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dbcl import cli


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def invoke() -> Callable[..., str]:
    """Run a command in this process and give what it prints; its errors are raised here."""

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160"})
        if result.exception:
            raise result.exception
        return result.output

    return run
