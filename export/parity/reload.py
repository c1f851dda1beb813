"""Answer probes from bundles, with nothing imported but `serving`. `export.parity.fresh_process` runs this script.

Each line of its input is JSON, [BUNDLE, FOLDER]. It reads FOLDER/probe.npz, writes FOLDER/outputs.npz, and prints
"answered". It ends where its input does: with the export.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from serving.engine import Engine
from serving.errors import BundleError
from serving.requests.types import Tensors
from serving.torchscript import torchscript_error


def main(bundle: Path, folder: Path) -> None:
    """Answer `folder`/probe.npz from `bundle`, in `folder`/outputs.npz.

    Raises:
        BundleError: as `Engine.open`; or its program cannot be loaded, though TorchScript works.
    """
    engine = Engine.open(bundle)
    failure = engine.lookup_program.failure
    if failure is not None and torchscript_error() is None:  # a server would build the program from the manifest
        raise BundleError(failure)
    probe = np.load(folder / "probe.npz", allow_pickle=False)
    tensors = Tensors(None, probe["values"], probe["lengths"], probe.get("weights"))
    np.savez(folder / "outputs.npz", **dict[str, Any](engine.outputs(tensors)))


if __name__ == "__main__":
    for line in sys.stdin:
        main(*map(Path, json.loads(line)))
        print("answered", flush=True)
