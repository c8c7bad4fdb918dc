"""Compile a configuration's programs for a topology and print, as JSON, what their compiled forms hold.

python compile_run.py CONFIG TOPOLOGY [KEY=VALUE]...
"""

import json
import re
import sys

from jaxrl_llm.cli.aot import compile_for
from jaxrl_llm.config import load


def facts(program):
    text = program.compiled.as_text()
    return {
        "name": program.name,
        "seconds": round(program.seconds, 1),
        "argument_bytes": program.argument_bytes,
        "peak_bytes": program.peak_bytes,
        "splash": sorted(re.findall(r"%(splash_mha_[a-z]+)_\w+\S* = .*custom-call\(.*tpu_custom_call", text)),
        "cudnn": sorted(re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)),
        "products": [line.strip() for line in text.splitlines() if re.search(r" (dot|convolution)\(", line)],
    }


if __name__ == "__main__":
    config, topology, *overrides = sys.argv[1:]
    print(json.dumps([facts(program) for program in compile_for(load(config, overrides), topology)]))
