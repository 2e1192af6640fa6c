"""`dbcl env`: versions and hardware for a bug report."""

import os
import platform

import numpy
import safetensors
import torch

import dbcl
from dbcl.cli.console import AsJson, console, print_json


def env(as_json: AsJson = False) -> None:
    """Print a block to paste into a bug report."""
    facts = {
        "dbcl": dbcl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "no",
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "DBCL_DATA": os.environ.get("DBCL_DATA", "not set"),
    }
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        console.print(f"{name + ':':<15}{value}", highlight=False, soft_wrap=True)
