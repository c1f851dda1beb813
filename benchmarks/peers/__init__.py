"""Other ways to serve the same tables, each set up as its documentation advises. They use none of our code.

They run in environments of their own (requirements/bench*.txt), and speak of one request alike: `ids` int64
[B, ids a sample], sample-major, bags of a fixed size padded with a row of zeros; `embeddings` float32 [B, D].
"""
