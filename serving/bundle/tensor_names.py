"""The names of the tensors of a lookup in requests and answers. Dense inputs and scores have other names."""

# The inputs. All others are dense inputs.
ID_INPUTS = ("values", "lengths", "weights")
# The output with the pooled embeddings, [B, D]; and the output with rows, a row for each id: [M], for each feature
# [n, dim], one after the other.
EMBEDDINGS, SEQUENCES = "embeddings", "sequences"
# The output with the pooled embeddings of shared features, [1, D].
SHARED = "once"
# The outputs. All others are scores.
LOOKED_UP = (EMBEDDINGS, SEQUENCES, SHARED)
