"""The tables of MLPerf's DLRM-v2, without rows."""

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

DIM = 128
# fmt: off
ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)
_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
# The ids of a bag, by table.
IDS_OF_BAGS = {f"t{number}": float(ids) for number, ids in enumerate(_IDS)}


def dlrm_tables() -> EmbeddingBagCollection:
    """The collection, on the meta device."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{number}"]
            )
            for number, rows in enumerate(ROWS)
        ],
        device="meta",
    )
