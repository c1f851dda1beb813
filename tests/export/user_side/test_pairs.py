"""Products of all pairs of rows, of which some are the user's: in every order of rows, and for every selection."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.export.user_side.test_once_per_user import ITEM, ITEMS, USER, Written, assert_as_repeated, rewritten
from tests.support.long_cases import one_in

# The user has three rows of ITEM columns, and the item has one; the layers of `Pairs` make two more of the item.
ROWS = USER // ITEM + 3
Select = Callable[[Tensor], Tensor]


class Pairs(nn.Module):
    """Products of all pairs of rows, in some order, and a layer over some of the products."""

    def __init__(self, order: Sequence[int], select: Select, multiply: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.select, self.multiply = order, select, multiply
        self.item = nn.Linear(ITEM, 2 * ITEM)
        self.layer = nn.Linear(select(torch.zeros(1, ROWS, ROWS)).shape[1], 5)

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = embeddings[:, :USER].reshape(-1, USER // ITEM, ITEM), embeddings[:, USER:]
        rows = [*user.unbind(1), item, *self.item(item).tanh().chunk(2, dim=1)]
        products = self.multiply(torch.stack([rows[number] for number in self.order], dim=1))
        answer: Tensor = self.layer(self.select(products))
        return answer


def below_diagonal(products: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(ROWS, ROWS, -1)
    return products[:, rows, columns]


UPPER = torch.triu_indices(ROWS, ROWS, 1)
MASK = torch.ones(ROWS, ROWS).triu(1)
ORDERS = {
    "user first": range(ROWS),
    "items first": [3, 4, 5, 0, 1, 2],
    "one by one": [0, 3, 1, 4, 2, 5],
}
SELECTIONS: dict[str, Select] = {
    "above the diagonal": lambda products: products[:, UPPER[0], UPPER[1]],
    "indices made in the forward": below_diagonal,
    "all": lambda products: products.flatten(1),
    "flat indices": lambda products: products.flatten(1).index_select(1, UPPER[0] * ROWS + UPPER[1]),
    "a mask": lambda products: (products * MASK).flatten(1),
    "a row": lambda products: products[:, 1],
    "twice, backwards": lambda products: products[:, [2, 2, -1], [1, 1, 0]],
}
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bmm": lambda rows: torch.bmm(rows, rows.transpose(1, 2)),
    "matmul": lambda rows: rows @ rows.mT,
    "without a rule for what follows": lambda rows: torch.bmm(rows, rows.transpose(1, 2)).softmax(2),
    "some rows": lambda rows: nn.functional.pad(rows[:, 1:4] @ rows.permute(0, 2, 1), (0, 0, 1, 2)),
}


@pytest.mark.parametrize("order", one_in(3, ORDERS))
@pytest.mark.parametrize("selection", SELECTIONS)
@torch.no_grad()
def test_products_of_pairs_are_those_of_repeated_rows(order: str, selection: str) -> None:
    module = Pairs(ORDERS[order], SELECTIONS[selection], PRODUCTS["bmm"])
    once = rewritten(module)
    assert_as_repeated(once, module)
    assert not once.left_alone


@pytest.mark.parametrize("order", one_in(3, ORDERS))
@pytest.mark.parametrize("product", [name for name in PRODUCTS if name != "bmm"])
@torch.no_grad()
def test_every_kind_of_product_of_rows_answers_as_repeated_rows(order: str, product: str) -> None:
    module = Pairs(ORDERS[order], SELECTIONS["above the diagonal"], PRODUCTS[product])
    assert_as_repeated(rewritten(module), module)


@torch.no_grad()
def test_pairs_above_the_diagonal_need_no_product_of_user_features() -> None:
    once = rewritten(Pairs(ORDERS["one by one"], SELECTIONS["above the diagonal"], PRODUCTS["bmm"]))
    products = [node for node in once.items.graph.nodes if str(node.target) == "aten.matmul"]
    assert len(products) == 1  # of the items' rows
    embeddings = torch.randn(ITEMS, USER + ITEM)
    with Written() as written:
        once.items(embeddings, *once.user(embeddings[:1]))
    assert written.columns == 3 * ITEM  # the items' three rows; all six have twice as many
