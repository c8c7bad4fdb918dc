"""JetStream's stock Driver streams from PolicyEngine what our scheduler makes with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from sampler_reference import EOS


def test_the_stock_driver_streams_our_greedy_tokens():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("driver_program.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    tokens = json.loads(done.stdout.splitlines()[-1])
    assert len(tokens["driver"]) == 12
    # The Driver leaves out the token that ends a completion.
    assert tokens["driver"] == [[i for i in ids if i != EOS] for ids in tokens["ours"]]
    assert any(ids[-1] == EOS for ids in tokens["ours"])
    assert any(ids[-1] != EOS for ids in tokens["ours"])
