"""Models of ids: KeyedJaggedTensors that the forward builds, joins, takes apart or changes."""

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.models.inputs import DIM, POOLED, ROWS_OF, NamedModel, ids, numbers, of, pooled_ids, positional
from tests.support.models import Spec, collection

ORDER = ("user_id", "item_id", "words")
ENDS = Spec("node", 50, DIM, "SUM", ("lhs_node", "rhs_node"))


class Scored(nn.Module):
    """Three pooled features and a score; the forms differ in where the KeyedJaggedTensor comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED)
        self.top = nn.Linear(3 * DIM, 2)

    def scores(self, keyed: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.top(self.bags(keyed).values())
        return answer


class OfMatrix(Scored):
    """Most code on GitHub: ids [B, F], one for each feature."""

    def forward(self, ids: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor.from_lengths_sync(
            keys=list(ORDER), values=ids.T.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int32)
        )
        return self.scores(keyed)


class OfLists(Scored):
    """Lengths, and what each sample is worth, are lists of Python."""

    def forward(self, ids: Tensor) -> Tensor:
        lengths = torch.tensor([1] * (len(ids) * 2), dtype=torch.int32)
        lengths = torch.cat([lengths, torch.as_tensor(ids.shape[0] * [1])])
        scores = self.scores(KeyedJaggedTensor(keys=list(ORDER), values=ids.t().flatten(), lengths=lengths))
        return scores * torch.tensor([0.5] * len(ids) * 2).view(-1, 2) - torch.tensor([1, 2] * len(ids)).view(-1, 2)


class OfMadeOffsets(Scored):
    """Offsets of ids [B, F] are counted."""

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(ids.numel() + 1)
        return self.scores(KeyedJaggedTensor.from_offsets_sync(list(ORDER), ids.t().flatten(), offsets))


class OfColumns(Scored):
    """NCF and two towers: `forward(user_ids, item_ids)`, each [B], joined by torch.cat."""

    def forward(self, user_ids: Tensor, item_ids: Tensor, words: Tensor) -> Tensor:
        values = torch.cat([user_ids, item_ids, words])
        lengths = torch.ones_like(values)
        return self.scores(KeyedJaggedTensor.from_lengths_sync(list(ORDER), values, lengths))


class OfSortedDict(Scored):
    """hello-torchrec: a dict of [B], in the order of its sorted names, lengths from a list of Python."""

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        samples = next(iter(features.values())).size(0)
        lengths: list[int] = []
        for _ in sorted(features):
            lengths.extend([1] * samples)
        values = torch.cat([features[key] for key in sorted(features)])
        keyed = KeyedJaggedTensor.from_lengths_sync(sorted(features), values, torch.tensor(lengths, dtype=torch.long))
        return self.scores(keyed)


class Weighted(nn.Module):
    """Scored ids (`idscore_features`): a weight for each id."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED[:2], weighted=True)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, keyed: KeyedJaggedTensor, idscore: KeyedJaggedTensor | None = None) -> Tensor:
        answer: Tensor = self.top(self.bags(keyed).values())
        return answer if idscore is None else answer * 0


class OfOffsets(Scored):
    """Loaders that keep offsets: `from_offsets_sync`."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.scores(KeyedJaggedTensor.from_offsets_sync(list(ORDER), values, offsets))


class OfJagged(Scored):
    """Merlin's loaders: a JaggedTensor for each feature, joined by `from_jt_dict`."""

    def forward(self, features: dict[str, JaggedTensor]) -> Tensor:
        return self.scores(KeyedJaggedTensor.from_jt_dict({key: features[key] for key in ORDER}))


class OfJaggedPermuted(Scored):
    """What was joined by `from_jt_dict` is put into the order of the tables."""

    def forward(self, features: dict[str, JaggedTensor]) -> Tensor:
        return self.scores(KeyedJaggedTensor.from_jt_dict({key: features[key] for key in ORDER}).permute([2, 0, 1]))


class Joined(Scored):
    """User and item side are joined by KeyedJaggedTensor.concat."""

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        return self.scores(KeyedJaggedTensor.concat([user, item]))


class JoinedByHand(Scored):
    """HSTU: keys, values and lengths of two are joined by torch.cat."""

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        keyed = KeyedJaggedTensor.from_lengths_sync(
            keys=user.keys() + item.keys(),
            values=torch.cat([user.values(), item.values()], dim=0),
            lengths=torch.cat([user.lengths(), item.lengths()], dim=0),
        )
        return self.scores(keyed)


class OneOfEach(Scored):
    """AdvancedNCF: as many samples as a third of the ids, for each sample has one of each key."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        samples = keyed.values().size(0) // len(keyed.keys())
        scores = self.scores(keyed)
        if scores.size(0) != samples:
            raise ValueError(f"expected {samples} samples, got {scores.size(0)}")
        by_key = keyed.values().view(len(keyed.keys()), samples)
        return scores + torch.fmod(by_key, 7).t().float()[:, :2]


class Permuted(Scored):
    """`permute`, before a collection that wants another order."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        return self.scores(keyed.permute([2, 0, 1]))


class Split(nn.Module):
    """`split`, for two collections."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = collection(POOLED[:1]), collection(POOLED[1:], seed=1)
        self.top = nn.Linear(3 * DIM, 1)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        user, item = keyed.split([1, 2])
        answer: Tensor = self.top(torch.cat([self.user(user).values(), self.item(item).values()], dim=1))
        return answer


class Padded(Scored):
    """Histories as a matrix, filled up with 0: what is not 0 becomes a bag."""

    def forward(self, user_ids: Tensor, item_ids: Tensor, words: Tensor) -> Tensor:
        is_word = words != 0
        lengths = torch.cat([torch.ones_like(user_ids), torch.ones_like(item_ids), is_word.sum(dim=1)])
        values = torch.cat([user_ids, item_ids, words[is_word]])
        return self.scores(KeyedJaggedTensor.from_lengths_sync(list(ORDER), values, lengths))


class Hashed(Scored):
    """Ids are taken modulo the rows of their table in the forward."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        return self.scores(KeyedJaggedTensor(keyed.keys(), keyed.values() % 40, lengths=keyed.lengths()))


class Pairs(nn.Module):
    """TwHIN and GiGL: both ends of an edge are samples of their own, twice as many as there are edges."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED[:2])
        self.translations = nn.Parameter(torch.rand(2, DIM))

    def forward(self, nodes: KeyedJaggedTensor, relations: Tensor) -> dict[str, Tensor]:
        pairs = self.bags(nodes).values().reshape(2 * relations.size(0), -1, DIM).sum(1).reshape(-1, 2, DIM)
        logits = (pairs[:, 0, :] * (pairs[:, 1, :] + self.translations[relations])).sum(-1)
        return {"logits": logits, "probabilities": torch.sigmoid(logits)}


class Edges(nn.Module):
    """What docs/models.md has in the place of TwHIN's forward: a key for each end of an edge, and its relation."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = collection([ENDS])
        self.relations = nn.Parameter(torch.randn(3, DIM))

    def forward(self, nodes: KeyedJaggedTensor, rels: Tensor) -> Tensor:
        ends = self.nodes(nodes).values().view(rels.size(0), -1, 2, self.relations.size(1)).sum(1)
        return (ends[:, 0] * (ends[:, 1] + self.relations[rels])).sum(-1)  # type: ignore[no-any-return]


def matrix(random: np.random.Generator, samples: int) -> tuple[Tensor]:
    return (torch.stack([of(random, ROWS_OF[key], samples) for key in ORDER], dim=1),)


def columns(random: np.random.Generator, samples: int) -> tuple[Tensor, ...]:
    return tuple(of(random, ROWS_OF[key], samples) for key in ORDER)


def sorted_dict(random: np.random.Generator, samples: int) -> tuple[dict[str, Tensor]]:
    return ({key: of(random, ROWS_OF[key], samples) for key in ORDER},)


def padded(random: np.random.Generator, samples: int) -> tuple[Tensor, ...]:
    words = of(random, ROWS_OF["words"], samples, 6)
    words[torch.arange(6) >= of(random, 7, samples, 1)] = 0
    return of(random, ROWS_OF["user_id"], samples), of(random, ROWS_OF["item_id"], samples), words


def offsets(random: np.random.Generator, samples: int) -> tuple[Tensor, Tensor]:
    keyed = pooled_ids(random, samples)
    return keyed.values(), keyed.offsets()


def weighted(random: np.random.Generator, samples: int) -> tuple[KeyedJaggedTensor]:
    keyed = ids(random, samples, "user_id", "item_id")
    weights = numbers(random, keyed.values().numel())
    return (KeyedJaggedTensor(keyed.keys(), keyed.values(), weights, lengths=keyed.lengths()),)


def jagged(random: np.random.Generator, samples: int) -> tuple[dict[str, JaggedTensor]]:
    return (pooled_ids(random, samples).to_dict(),)


def edges(random: np.random.Generator, samples: int) -> tuple[KeyedJaggedTensor, Tensor]:
    relations = of(random, 2, samples)
    # Relation 0 goes from users to items, relation 1 from items to users.
    is_user = torch.stack([relations == 0, relations == 1], dim=1).reshape(-1).int()
    return ids(random, 2 * samples, "user_id", "item_id", user_id=is_user, item_id=1 - is_user), relations


def ends(random: np.random.Generator, samples: int) -> tuple[KeyedJaggedTensor, Tensor]:
    lengths = of(random, 2, 2 * samples).int()
    keyed = KeyedJaggedTensor(list(ENDS.features), of(random, ENDS.rows, int(lengths.sum())), lengths=lengths)
    return keyed, of(random, 3, samples)


KEYS: dict[str, NamedModel] = {
    "ids_of_matrix": NamedModel(OfMatrix, matrix),
    "ids_of_lists": NamedModel(
        OfLists, matrix, refused="line [0-9]+: `lengths = torch.tensor.*lists as long as a batch"
    ),
    "ids_of_made_offsets": NamedModel(OfMadeOffsets, matrix),
    "ids_of_columns": NamedModel(OfColumns, columns),
    "ids_of_sorted_dict": NamedModel(
        OfSortedDict, sorted_dict, refused="line [0-9]+: `lengths.extend.*lists as long as a batch"
    ),
    "ids_of_offsets": NamedModel(OfOffsets, offsets),
    "ids_of_jagged": NamedModel(OfJagged, jagged),
    "ids_of_jagged_permuted": NamedModel(OfJaggedPermuted, jagged),
    "ids_weighted": NamedModel(Weighted, weighted),
    "ids_joined": NamedModel(
        Joined,
        positional(lambda random, n: ids(random, n, "user_id"), lambda random, n: ids(random, n, "item_id", "words")),
    ),
    "ids_joined_by_hand": NamedModel(
        JoinedByHand,
        positional(lambda random, n: ids(random, n, "user_id"), lambda random, n: ids(random, n, "item_id", "words")),
    ),
    "one_id_of_each_key": NamedModel(
        OneOfEach, positional(lambda random, n: ids(random, n, *ORDER, least=1, most=1))
    ),
    "ids_permuted": NamedModel(Permuted, positional(pooled_ids)),
    "ids_split": NamedModel(Split, positional(pooled_ids)),
    "ids_padded": NamedModel(Padded, padded, refused="makes the ids of key 'words' itself at .*line [0-9]+: `"),
    "ids_hashed": NamedModel(
        Hashed, positional(pooled_ids), refused="by aten.remainder.Scalar at .*line [0-9]+: `return self.scores"
    ),
    "ids_of_pairs": NamedModel(
        Pairs, edges, refused="cannot be traced for any number of samples at .*line [0-9]+: `pairs = "
    ),
    "ends_of_edges": NamedModel(Edges, ends),
}
