from pathlib import Path

import pytest

from dbcl.audit.suite import audit
from dbcl.errors import AuditError
from dbcl.run import preset
from dbcl.run.presets import to_toml


def test_a_run_with_a_guarantee_is_not_audited_as_if_its_noise_were_white(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(preset("private")))
    with pytest.raises(AuditError, match="noise that is correlated over rounds"):
        audit(tmp_path)
