"""Other ways to serve the same tables, and whole models, each set up as its documentation advises.

They use none of our code. They run in environments of their own (requirements/bench*.txt), and speak of one request
alike: `ids` int64 [B, ids a sample], sample-major, bags of a fixed size padded with a row of zeros, and of a whole
model `dense` float32 [B, width]; `embeddings` float32 [B, D], or `scores` float32 [B, 1].
"""
