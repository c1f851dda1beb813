"""MovieLens-100k as KJT features, read from the installed recbole package.

The data is from GroupLens (https://grouplens.org/datasets/movielens/100k/). It is for research and must not be
redistributed, so nothing of it is written to this repository. A rating of 4 or 5 is a positive sample.
"""

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]

POSITIVE_RATING = 4.0
RECENT_ITEMS = 20
TRAIN_SHARE = 0.8
# The age groups of MovieLens-1M: each starts at one of these ages.
_AGE_STARTS = (18, 25, 35, 45, 50, 56)


@dataclass(frozen=True, slots=True)
class Jagged:
    """One feature of R samples: ids int64 [N], and where each sample's bag starts, int64 [R + 1]."""

    values: Ids
    offsets: Ids

    @classmethod
    def of(cls, bags: Iterable[Sequence[int]]) -> "Jagged":
        """Join bags of ids, one for each sample."""
        bags = list(bags)
        lengths = np.fromiter(map(len, bags), np.int64, len(bags))
        values = np.fromiter((id_ for bag in bags for id_ in bag), np.int64, lengths.sum())
        return cls(values, np.concatenate([[0], np.cumsum(lengths)]))

    def take(self, samples: Ids) -> tuple[Ids, Lengths]:
        """The bags of `samples`, int64 [S]: values int64 [N], lengths int32 [S]."""
        starts = self.offsets[samples]
        lengths = self.offsets[samples + 1] - starts
        source = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        return self.values[source], lengths.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples: features by name as (values, lengths), and labels float32 [B]."""

    features: dict[str, tuple[Ids, Lengths]]
    labels: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Samples:
    """All ratings in order of time, with labels float32 [R]. The first ones train, the last ones test."""

    features: Mapping[str, Jagged]
    labels: npt.NDArray[np.float32]

    @property
    def train(self) -> Ids:
        """The numbers of the samples that train."""
        return np.arange(int(len(self.labels) * TRAIN_SHARE))

    @property
    def test(self) -> Ids:
        """The numbers of the samples that test. All are later than those that train."""
        return np.arange(len(self.train), len(self.labels))

    def batches(self, samples: Ids, size: int) -> Iterator[Batch]:
        """Divide `samples` into batches of up to `size`, in the order given."""
        for start in range(0, len(samples), size):
            chosen = samples[start : start + size]
            features = {name: jagged.take(chosen) for name, jagged in self.features.items()}
            yield Batch(features, self.labels[chosen])


class Vocabulary:
    """Numbers tokens from 0 in sorted order."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._numbers = {token: number for number, token in enumerate(sorted(set(tokens)))}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, token: str) -> int:
        return self._numbers[token]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The features of each user and item, as ids, and the number of rows that each feature's table needs."""

    users: dict[str, dict[str, list[int]]]
    items: dict[str, dict[str, list[int]]]
    rows: dict[str, int]


@cache
def catalogue() -> Catalogue:
    """Read users and items, and number their tokens."""
    users, items = _read("user"), _read("item")
    vocabularies = {
        "user_id": Vocabulary(user["user_id"] for user in users),
        "gender": Vocabulary(user["gender"] for user in users),
        "occupation": Vocabulary(user["occupation"] for user in users),
        "zip_prefix": Vocabulary(user["zip_code"][:2] for user in users),
        "item_id": Vocabulary(item["item_id"] for item in items),
        "year": Vocabulary(item["release_year"] for item in items),
        "genres": Vocabulary(genre for item in items for genre in item["class"].split()),
        "title_words": Vocabulary(word for item in items for word in _words(item)),
    }

    def ids(feature: str, *tokens: str) -> list[int]:
        return [vocabularies[feature][token] for token in tokens]

    return Catalogue(
        users={
            user["user_id"]: {
                "user_id": ids("user_id", user["user_id"]),
                "age_bucket": [int(np.searchsorted(_AGE_STARTS, int(user["age"]), side="right"))],
                "gender": ids("gender", user["gender"]),
                "occupation": ids("occupation", user["occupation"]),
                "zip_prefix": ids("zip_prefix", user["zip_code"][:2]),
            }
            for user in users
        },
        items={
            item["item_id"]: {
                "item_id": ids("item_id", item["item_id"]),
                "year": ids("year", item["release_year"]),
                "genres": ids("genres", *item["class"].split()),
                "title_words": ids("title_words", *_words(item)),
            }
            for item in items
        },
        rows={name: len(vocabulary) for name, vocabulary in vocabularies.items()}
        | {"age_bucket": len(_AGE_STARTS) + 1},
    )


def read_samples() -> Samples:
    """Read every rating as a sample."""
    ratings = sorted(
        _read("inter"), key=lambda rating: (float(rating["timestamp"]), rating["user_id"], rating["item_id"])
    )
    movies = catalogue()
    samples = [movies.users[rating["user_id"]] | movies.items[rating["item_id"]] for rating in ratings]
    features = {name: Jagged.of(sample[name] for sample in samples) for name in samples[0]}
    features["recent_items"] = Jagged.of(_recent_items(ratings, movies))
    labels = np.array([_positive(rating) for rating in ratings], np.float32)
    return Samples(features, labels)


def _recent_items(ratings: Sequence[Mapping[str, str]], movies: Catalogue) -> Iterator[list[int]]:
    """For each rating the user's last positive items, all rated strictly before it: nothing leaks."""
    times: dict[str, list[float]] = defaultdict(list)
    items: dict[str, list[int]] = defaultdict(list)
    for rating in ratings:
        user, now = rating["user_id"], float(rating["timestamp"])
        earlier = bisect_left(times[user], now)
        yield items[user][max(0, earlier - RECENT_ITEMS) : earlier]
        if _positive(rating):
            times[user].append(now)
            items[user] += movies.items[rating["item_id"]]["item_id"]


def _positive(rating: Mapping[str, str]) -> bool:
    return float(rating["rating"]) >= POSITIVE_RATING


def _words(item: Mapping[str, str]) -> list[str]:
    return item["movie_title"].lower().split()


def _read(kind: str) -> list[dict[str, str]]:
    """Read one of RecBole's atomic files: tab-separated, with `name:type` in the first line."""
    spec = find_spec("recbole")  # importing it would need a dozen more packages
    if spec is None or spec.origin is None:
        raise FileNotFoundError("recbole==1.2.1 carries MovieLens-100k: pip install --no-deps recbole==1.2.1")
    path = Path(spec.origin).parent / "dataset_example" / "ml-100k" / f"ml-100k.{kind}"
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [column.partition(":")[0] for column in next(reader)]
        return [dict(zip(names, row, strict=True)) for row in reader]
