"""Peer: TorchServe's handler, which is given the requests that wait."""

import numpy as np
from tables import Tables


class Lookup:
    """Joins them."""

    def initialize(self, context) -> None:
        self.tables = Tables.from_environment()

    def handle(self, data, context):
        inputs = [np.frombuffer(each["data"], np.int64).reshape(-1, self.tables.ids) for each in data]
        ends = np.cumsum([len(each) for each in inputs])[:-1]
        return [each.tobytes() for each in np.split(self.tables(np.concatenate(inputs)), ends)]
