"""State dicts, saved as trainings save them."""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

State = dict[str, Tensor]


def save_safetensors(state: State, path: Path) -> Path:
    save_file(state, path / "w.safetensors")
    return path / "w.safetensors"


def save_dcp(state: State, path: Path) -> Path:
    save({"model": dict(state)}, checkpoint_id=path / "dcp")
    return path / "dcp"
