"""The tables of MLPerf's DLRM-v2: rows (uncapped), ids for each sample, dim 128."""

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

# https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm
DIM = 128
# fmt: off
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
    11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)
IDS_PER_SAMPLE = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on


def dlrm_tables(row_cap: int = max(ROWS), dim: int = DIM, device: str | None = "meta") -> EmbeddingBagCollection:
    """Tables t0, t1, … that features f0, f1, … read. All are sums.

    Args:
        row_cap: most rows of a table.
        dim: of every table.
        device: of the rows. "meta": there are none. None: the default of torch.
    """
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=min(rows, row_cap),
                embedding_dim=dim,
                feature_names=[f"f{number}"],
            )
            for number, rows in enumerate(ROWS)
        ],
        device=device,
    )
