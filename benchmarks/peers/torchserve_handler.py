"""Peer: TorchServe's handler, which is given the requests that wait."""

from arrays import unpack
from model import Model


class Lookup:
    """Joins them."""

    def initialize(self, context) -> None:
        self.model = Model.from_environment()

    def handle(self, data, context):
        requests = [unpack(item["data"], self.model.inputs) for item in data]
        return [answer.tobytes() for answer in self.model.together(requests)]
