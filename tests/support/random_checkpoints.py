"""Models made at random, saved in every form that a trainer writes, and changed as people's files are."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchrec import KeyedJaggedTensor

from tests.support.models import Spec, collection

State = dict[str, Tensor]
Random = np.random.Generator
DIM = 8


def _layers(random: Random) -> nn.Module:
    """[B, DIM] in and out."""
    return (
        nn.Linear(DIM, DIM, bias=bool(random.random() < 0.5)),
        nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)),
        nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)),
        nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.PReLU()),
    )[random.integers(4)]


def _buffers(random: Random) -> dict[str, Tensor]:
    every: dict[str, Tensor] = {
        "columns": torch.from_numpy(random.permutation(DIM)),
        "shift": torch.from_numpy(random.integers(-3, 3, DIM, np.int32)),
        "keep": torch.from_numpy(random.random(DIM) < 0.5),
        "octets": torch.from_numpy(random.integers(0, 255, DIM, np.uint8)),
        "scale": torch.tensor(float(random.random())),
        "precise": torch.from_numpy(random.random((DIM, DIM))),
        "narrow": torch.from_numpy(random.random(DIM)).half(),
        "shorter": torch.from_numpy(random.random(DIM)).bfloat16(),
        "mask": torch.zeros(DIM).masked_fill(torch.from_numpy(random.random(DIM) < 0.3), -torch.inf),
        "cube": torch.from_numpy(random.random((2, DIM, 1))).float(),
        "repeats": torch.tensor(int(random.integers(1, 4))),
    }
    return {name: value for name, value in every.items() if random.random() < 0.5}


# What each buffer does to [B, DIM].
_USES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda x, of: x.index_select(1, of),
    "shift": lambda x, of: x + of,
    "keep": lambda x, of: torch.where(of, x, -x),
    "octets": lambda x, of: x * (of.float() / 255),
    "scale": lambda x, of: x * of + of,
    "precise": lambda x, of: (x.double() @ of).float(),
    "narrow": lambda x, of: x - of.float(),
    "shorter": lambda x, of: x * of.float(),
    "mask": lambda x, of: (x + of).softmax(1) + x,
    "cube": lambda x, of: x * of[0, :, 0] + of[1, :, 0],
    "repeats": lambda x, of: x * of,
}


class Part(nn.Module):
    """A collection, layers after it, and buffers that its answer is made with."""

    def __init__(self, random: Random, prefix: str) -> None:
        super().__init__()
        self.specs = tuple(
            Spec(f"t{n}", int(random.integers(5, 30)), DIM, str(random.choice(["SUM", "MEAN"])), (f"{prefix}{n}",))
            for n in range(random.integers(1, 3))
        )
        self.ebc, self.head = collection(self.specs, seed=int(random.integers(1 << 30))), _layers(random)
        self.buffer_names = []
        for name, buffer in _buffers(random).items():
            self.register_buffer(name, buffer)
            self.buffer_names.append(name)
        if random.random() < 0.3:
            self.phases = nn.Parameter(torch.polar(torch.ones(DIM), torch.from_numpy(random.random(DIM)).float()))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.ebc(ids).values().view(-1, len(self.specs), DIM).sum(1)
        answer: Tensor = self.head(pooled)
        for name in self.buffer_names:
            answer = _USES[name](answer, getattr(self, name))
        if hasattr(self, "phases"):
            answer = (answer * self.phases).real
        return answer


class Model(Part):
    """A part, perhaps a tower with the same names, and perhaps tied weights."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng((seed, 1))
        torch.manual_seed(seed)
        super().__init__(random, "x")
        self.tower = Part(random, "y") if random.random() < 0.6 else None
        self.tie = str(random.choice(["none", "table", "read", "layers"]))
        table = self.ebc.embedding_bags["t0"].weight
        if self.tie == "table":
            self.out = nn.Linear(DIM, len(table), bias=False)
            self.out.weight = table
        if self.tie == "layers":
            self.one, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.other.weight = self.one.weight

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        answer = super().forward(ids)
        if self.tower is not None:
            answer = answer + self.tower(ids)
        if self.tie == "table":
            answer = self.out(answer)
        if self.tie == "read":
            answer = answer @ self.ebc.embedding_bags["t0"].weight.t()
        if self.tie == "layers":
            answer = self.other(self.one(answer).relu())
        return answer

    @property
    def all_specs(self) -> tuple[Spec, ...]:
        return self.specs + (() if self.tower is None else self.tower.specs)


def model(seed: int) -> Model:
    """A model as its code builds it."""
    return Model(seed).eval()


def trained(seed: int) -> Model:
    """The same model with other numbers everywhere."""
    module, random = model(seed), torch.Generator().manual_seed(seed)
    other = np.random.default_rng((seed, 2))
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random, dtype=weight.dtype))
        for name, buffer in module.named_buffers():
            buffer.copy_(_again(name.rpartition(".")[2], buffer, other))
    return module


def _again(name: str, old: Tensor, random: Random) -> Tensor:
    while True:
        if name.startswith(("running_var", "num_batches")):
            return old + 2
        if name == "running_mean":
            return old - 0.25
        if (buffer := _buffers(random).get(name)) is not None:
            return buffer


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Form:
    """A form that a trainer saves a model in.

    Attributes:
        wrap: the state dict of the model as the trainer has it, and what its keys begin with.
        write: writes it to a folder: the path of the checkpoint.
    """

    wrap: Callable[[Model], tuple[dict[str, Any], str]]
    write: Callable[[dict[str, Any], Path], Path]


def _torch(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "w.pt")
    return folder / "w.pt"


def _nested(*names: str) -> Callable[[dict[str, Any], Path], Path]:
    def write(state: dict[str, Any], folder: Path) -> Path:
        saved: dict[str, Any] = state
        for name in names:
            saved = {name: saved, "epoch": 3}
        return _torch(saved | {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, folder)

    return write


def _safetensors(state: dict[str, Any], folder: Path) -> Path:
    save_file({key: value.detach().clone() for key, value in state.items()}, folder / "w.safetensors")
    return folder / "w.safetensors"


def _dcp(state: dict[str, Any], folder: Path) -> Path:
    save_dcp(
        {"model": state, "step": 3}, checkpoint_id=folder / "dcp", no_dist=not torch.distributed.is_initialized()
    )
    return folder / "dcp"


def _state(module: nn.Module) -> dict[str, Any]:
    return dict(module.state_dict())


FORMS: Mapping[str, Form] = {
    "plain": Form(lambda module: (_state(module), ""), _torch),
    "nested": Form(lambda module: (_state(module), ""), _nested("model")),
    "data parallel": Form(lambda module: (_state(nn.DataParallel(module)), "module."), _torch),
    "DDP": Form(lambda module: (_state(DistributedDataParallel(module)), "module."), _nested("model_state_dict")),
    "compiled": Form(lambda module: (_state(torch.compile(module)), "_orig_mod."), _torch),  # type: ignore[arg-type]
    "compiled within": Form(lambda module: (_compiled_within(module), ""), _nested("model")),
    "averaged": Form(lambda module: (_state(AveragedModel(module)), "module."), _torch),
    "Lightning": Form(
        lambda module: ({f"model.{key}": tensor for key, tensor in module.state_dict().items()}, "model."),
        _nested("state_dict"),
    ),
    "Lightning, compiled": Form(
        lambda module: ({f"model._orig_mod.{key}": tensor for key, tensor in module.state_dict().items()}, "model._orig_mod."),
        _nested("state_dict"),
    ),
    "safetensors": Form(lambda module: (_state(module), ""), _safetensors),
    "safetensors, DDP": Form(lambda module: (_state(nn.DataParallel(module)), "module."), _safetensors),
    "DCP": Form(lambda module: (_state(module), ""), _dcp),
    "FSDP2": Form(lambda module: (_state(_sharded(module)), ""), _dcp),
}  # fmt: skip


def _compiled_within(module: Model) -> dict[str, Any]:
    module.head = torch.compile(module.head)  # type: ignore[assignment]
    state = _state(module)
    module.head = module.head._orig_mod  # type: ignore[assignment]
    return state


def _sharded(module: Model) -> nn.Module:
    """Its layers as DTensors."""
    fully_shard(module.head)
    return module


def save_without_twins(module: Model, folder: Path) -> Path:
    """As safetensors saves a model: a tensor with several names has one of them."""
    save_model(module, str(folder / "w.safetensors"))
    return folder / "w.safetensors"
