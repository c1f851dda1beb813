"""The standing benchmarks: ratios taken in one run, on one machine, over the same bytes.

torch's own tables lie in huge pages, too, where it can have them: torch reads that from the environment when it first
allocates, in this process and in those of other servers.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
