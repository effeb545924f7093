"""``tnlm-train run`` under the real torchrun, as tests start it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tnlm.training.config import TrainConfig

CLI = ("-m", "tnlm.training.cli")


def torchrun(
    config: TrainConfig, path: Path, *options: str, program: Sequence[str] = CLI, stderr: int = subprocess.PIPE
) -> subprocess.Popen:
    """``tnlm-train run`` under torchrun, with a configuration file."""
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program, "run", "--config"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen([*command, str(path)], env=environment, **pipes)


def finish(*processes: subprocess.Popen) -> list[str]:
    """What each printed on stdout."""
    printed = []
    for process in processes:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, (errors or output)[-3000:]
        printed.append(output)
    return printed
