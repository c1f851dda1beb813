"""Peer: TorchServe's handler, which is given the requests that wait."""

from arrays import unpack
from model import Model


class Lookup:
    """Joins them."""

    def initialize(self, context) -> None:
        self.model = Model.from_environment()

    def handle(self, data, context):
        requests = [unpack(each["data"], self.model.inputs) for each in data]
        return [each.tobytes() for each in self.model.together(requests)]
