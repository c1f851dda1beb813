"""Models of habits in what follows the collections: asserts, branches on shapes, numpy's names, assignments."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torchrec import KeyedJaggedTensor
from torchrec.modules.regroup import KTRegroupAsDict

from tests.models.calls import Network
from tests.models.inputs import DIM, POOLED, WIDTH, NamedModel, dense, pooled_ids, positional
from tests.support.models import collection


class Asserts(Network):
    """torchrec's and DCN's examples: shapes are asserted."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.bags(keyed).values()
        assert pooled.dim() == 2, "two dimensions"
        assert pooled.shape == (numbers.shape[0], 3 * DIM)
        assert numbers.size(-1) == WIDTH
        torch._assert(numbers.size(0) == pooled.size(0), "as many samples")  # type: ignore[no-untyped-call, unused-ignore]
        return self.logits(keyed, numbers)


class Branches(Network):
    """Layers for two and three dimensions: `if x.dim() == 3`."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.bags(keyed).values().view(-1, 3, DIM)
        if pooled.dim() == 3:
            pooled = pooled.mean(dim=1)
        if numbers.ndim == 1 or numbers.shape[1] != WIDTH:
            numbers = numbers.unsqueeze(1)
        product: Tensor = pooled * self.of_dense(numbers)
        return product


class Ranges(Network):
    """DLRM's and xDeepFM's interactions: loops over the size of a dimension."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        every = torch.stack([*self.bags(keyed).to_dict().values(), self.of_dense(numbers)], dim=1)
        products = [
            (every[:, first] * every[:, second]).sum(dim=1)
            for first in range(every.size(1))
            for second in range(first + 1, every.size(1))
        ]
        rows, columns = torch.triu_indices(4, 4, offset=1)
        products.append(torch.bmm(every, every.transpose(1, 2))[:, rows, columns].sum(dim=1))
        return torch.stack(products, dim=1)


class Numpy(Network):
    """numpy's names and numbers: `axis=`, `keepdims=`, np.float32, np.sqrt."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = torch.cat([self.bags(keyed).values(), self.of_dense(numbers)], axis=1)  # type: ignore[call-arg]
        centred = pooled - pooled.mean(axis=1, keepdims=True)  # type: ignore[call-overload]
        scaled = centred * np.float32(0.5) / np.sqrt(DIM)
        total: Tensor = np.square(DIM) * (scaled * scaled).sum(axis=-1)
        return total


class Assigns(Network):
    """A result is allocated, and filled by parts."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.bags(keyed).values()
        result: Tensor = pooled.new_zeros(pooled.size(0), 3 * DIM + 2)
        result[:, : 3 * DIM] = pooled
        result[:, -1] = numbers[:, 0]
        result[:, 0] += 1.0
        result += 0.5
        return result


class Biased(Network):
    """A column of ones, by the number of samples; `expand` and `repeat` of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.rand(1, DIM))

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        samples = keyed.stride()
        ones = torch.ones(numbers.shape[0], 1, device=numbers.device, dtype=numbers.dtype)
        tokens = self.token.expand(samples, -1) + self.token.repeat(numbers.size(0), 1)
        return torch.cat([self.logits(keyed, numbers), ones, tokens], dim=1)


class Identity(Network):
    """twitter's LargeEmbeddings: nn.Identity on a KeyedTensor, and `.values()` of that."""

    def __init__(self) -> None:
        super().__init__()
        self.surgery_cut_point = nn.Identity()

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.surgery_cut_point(self.bags(keyed)).values()
        answer: Tensor = self.top(torch.cat([pooled, self.of_dense(numbers)], dim=1))
        return answer


class PerKey(Network):
    """A projection for each feature out of an nn.ModuleDict, by the names of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({key: nn.Linear(DIM, 2) for key in ("user_id", "item_id", "words")})

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        answer = self.bags(keyed)
        with record_function("## towers ##"):
            towers = [self.towers[key](answer[key]) for key in answer.keys()]  # noqa: SIM118 - as it is written
        return torch.cat([*towers, numbers], dim=1)


class Regroups(nn.Module):
    """KTRegroupAsDict over two collections. One that was asked before, in another order, goes on with what it saw."""

    def __init__(self, other_order: bool = False) -> None:
        super().__init__()
        self.first, self.second = collection(POOLED[1:2]), collection(POOLED[2:], seed=1)
        self.regroup = KTRegroupAsDict([["words"], ["item_id"]], ["text", "item"])
        self.top = nn.Linear(2 * DIM, 1)
        if other_order:
            keyed = pooled_ids(np.random.default_rng(0), 2)  # both have one dim, or it would read past their ends
            self.regroup([self.second(keyed), self.first(keyed)])

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        groups = self.regroup([self.first(keyed), self.second(keyed)])
        answer: Tensor = self.top(torch.cat([groups["item"], groups["text"]], dim=1))
        return answer


class Half(Network):
    """Dense parts that were trained in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.of_dense.bfloat16()
        self.top.bfloat16()

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        hidden = self.of_dense(numbers.to(torch.bfloat16)).relu()
        answer: Tensor = self.top(torch.cat([self.bags(keyed).values().bfloat16(), hidden], dim=1))
        return answer.float()


class Modes(Network):
    """Dropout by `self.training`, branches on settings, BatchNorm, modules that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.BatchNorm1d(3 * DIM), None
        self.settings = {"squash": True, "layers": [1, 2]}

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.norm(self.bags(keyed).values())
        pooled = nn.functional.dropout(pooled, 0.5, training=self.training)
        if self.gate is not None:
            pooled = self.gate(pooled)
        if self.settings["squash"]:
            pooled = torch.tanh(pooled)
        if self.training:
            pooled = pooled + torch.randn_like(pooled)
        answer: Tensor = self.top(torch.cat([pooled, self.of_dense(numbers)], dim=1))
        return answer


class NoGrad(Network):
    """Inference models whose forward is decorated with torch.no_grad, and detaches and copies what it has."""

    @torch.no_grad()
    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        return self.logits(keyed, numbers).detach().clone().contiguous().cpu()


class Cosine(Network):
    """Two towers: normalized, einsum, a temperature that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.bags(keyed)
        user = nn.functional.normalize(pooled["user_id"], dim=-1)
        item = nn.functional.normalize(pooled["item_id"] + self.of_dense(numbers), dim=-1)
        return torch.einsum("bd,bd->b", user, item) / self.temperature.clamp(min=0.01)


class OfBatchSize(Network):
    """AdvancedNCF: a warning where a batch is small, a branch on the number of samples, and zeros in place of features."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.bags(keyed)["user_id"]
        batch_size = pooled.size(0)
        if batch_size < 2:
            logging.getLogger(__name__).debug("small batch: %s", batch_size)
        absent = torch.zeros(batch_size, 2 * DIM, device=pooled.device)
        answer: Tensor = self.top(torch.cat([pooled, absent, self.of_dense(numbers)], dim=1))
        return answer


class TablesOfOneName(nn.Module):
    """AdvancedNCF: two collections have tables of the same names, and read the same keys."""

    def __init__(self) -> None:
        super().__init__()
        self.factors, self.network = collection(POOLED[:2]), collection(POOLED[:2], seed=1)
        self.top = nn.Linear(DIM, 1)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        factors, network = self.factors(keyed), self.network(keyed)
        product = factors["user_id"] * factors["item_id"] + network["user_id"] * network["item_id"]
        answer: Tensor = self.top(product).sigmoid()
        return answer


class SizesOfPython(Network):
    """Python's own names for sizes: len(x), int(x.size(0)); halves of a batch that is there twice."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        samples = len(numbers)
        assert isinstance(samples, int)
        pooled = self.bags(keyed).values().view(int(samples), 3, int(DIM * 1.0))
        first, second = torch.split(torch.cat([pooled, pooled * 2]), int(numbers.size(0)))
        answer: Tensor = (first + second).sum(dim=1) * self.of_dense(numbers)
        return answer + torch.ones(len(pooled), DIM) / len(pooled[0])


class Bits(Network):
    """Numbers that are rounded to bfloat16 by their bits."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        return self.logits(keyed, numbers.view(torch.int32).bitwise_and(-(2**16)).view(torch.float32))


class NotCalled(Network):
    """gSASRec's table of outputs: a collection that another method looks up, of a table with the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.items = collection(POOLED[1:2], seed=3)

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        return self.logits(keyed, numbers)

    def of_items(self, keyed: KeyedJaggedTensor) -> Tensor:
        return self.items(keyed).values()  # type: ignore[no-any-return]


class Across(Network):
    """Two towers in training: the scores of all users with all items of the batch. Samples meet."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        pooled = self.bags(keyed)
        return torch.matmul(pooled["user_id"], (pooled["item_id"] + self.of_dense(numbers)).t()).softmax(dim=1)


OF_IDS: dict[str, Callable[[], nn.Module]] = {
    "tables_of_one_name": TablesOfOneName,
    "regrouped": Regroups,
    "regrouped_before": lambda: Regroups(other_order=True),
}

HABITS: dict[str, NamedModel] = {
    name: NamedModel(module, positional(pooled_ids, dense))
    for name, module in {
        "shape_asserts": Asserts,
        "branch_on_dimensions": Branches,
        "ranges_of_sizes": Ranges,
        "numpy_names": Numpy,
        "slice_assignment": Assigns,
        "sizes_of_batch": Biased,
        "identity_on_keyed": Identity,
        "module_by_key": PerKey,
        "bfloat16_modules": Half,
        "modes_and_settings": Modes,
        "no_grad": NoGrad,
        "cosine": Cosine,
        "sizes_of_python": SizesOfPython,
        "bits_of_numbers": Bits,
        "collection_not_called": NotCalled,
        "branch_on_batch_size": OfBatchSize,
    }.items()
} | {name: NamedModel(make, positional(pooled_ids)) for name, make in OF_IDS.items()}
HABITS["across_samples"] = NamedModel(
    Across,
    positional(pooled_ids, dense),
    refused=r"expected an answer with a row for each sample, got 'scores' \[B, B\]",
)
