"""Look up embeddings over gRPC. Does not need torch.

```python
with LookupClient("localhost:8001", "movielens") as client:
    answer = client.lookup({"genres": [[3, 5], [], [1]], "item_id": [[7], [8], [9]]})
    answer["genres"]  # [3, dim]
    answer.version  # the version of the model that answered
```
"""

from serving.client.clients import AsyncLookupClient, LookupClient
from serving.client.connection import DEFAULT_TIMEOUT_S, Tls
from serving.client.messages import Answer, Scores
from serving.client.model_info import ModelInfo
from serving.client.retries import Retries
from serving.requests.answers import JaggedRows

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Answer",
    "AsyncLookupClient",
    "JaggedRows",
    "LookupClient",
    "ModelInfo",
    "Retries",
    "Scores",
    "Tls",
]
