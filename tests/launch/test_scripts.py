"""The shell scripts parse, and make what they say."""

import stat
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(script):
    told = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert "set -euo pipefail" in script.read_text()


def test_credentials_are_made_for_all_names_and_readable_by_nobody_else(tmp_path):
    folder = tmp_path / "keys"
    subprocess.run([LAUNCH / "credentials.sh", folder, "node07", "10.0.0.7", "fd00::7"], check=True)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        ("token", "cert.pem", "key.pem"), 0o600
    )
    command = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", folder / "cert.pem"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(name in told for name in ("DNS:node07", "IP Address:10.0.0.7", "IP Address:FD00:0:0:0:0:0:0:7"))
    assert len((folder / "token").read_text().strip()) == 64
    assert subprocess.run([LAUNCH / "credentials.sh", folder], capture_output=True).returncode == 2
