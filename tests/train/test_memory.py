"""Temporary memory of the step at SmolLM2's size, from abstract shapes: nothing of it is allocated."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_step" / "memory.py"
MIB_VD = 49152 * 576 * 4 / 2**20

pytestmark = pytest.mark.slow


def temporaries(*options):
    """MiB that the step needs beside its arguments, compiled as a run would (the tests' own flags do not optimise)."""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *options]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(re.search(r"^\{.*\}$", out, re.MULTILINE)[0])["temporary_mib"]


def test_chunks_and_microbatches_need_an_eighth_of_all_logits_at_once():
    whole = ("--microbatches", "1", "--rows", "64")
    at_once = temporaries(*whole, "--head-chunk", "16384")
    assert 8 * temporaries() < at_once
    assert temporaries(*whole) < at_once / 2.5  # of the head alone


@pytest.mark.parametrize("split", [("1", "64"), ("8", "8")])
def test_twice_the_vocabulary_adds_the_gradient_of_the_table_and_nothing_else(split):
    shape = ("--microbatches", split[0], "--rows", split[1])
    more = temporaries(*shape, "--vocab", "98304") - temporaries(*shape)
    assert more < 1.05 * MIB_VD
