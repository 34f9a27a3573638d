"""What a module keeps comes back on the accelerator on which it computes."""

import torch
from torch import nn

from chainring.serializers import DictionaryDeserializer, DictionarySerializer


class Memory(nn.Module):
    """Keeps its last outputs, which it has not computed yet at first."""

    def __init__(self):
        super().__init__()
        self.linear, self.last, self.seen = nn.Linear(2, 2), None, torch.zeros(2)

    def serialize(self, serializer):
        self.last = serializer("last", self.last)
        serializer("seen", self.seen)


def test_a_tensor_that_was_none_at_first_comes_back_beside_the_parameters():
    """And one that is given is filled where it is."""
    saved, model = DictionarySerializer(), Memory().cuda()
    model.last = (torch.ones(2, device="cuda"), [torch.ones(1, device="cuda")])
    model.seen += 1
    saved.visit("model", model)
    host = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in saved.target.items()}
    host["model/last"] = (torch.ones(2), [torch.ones(1)])
    other = Memory().cuda()
    DictionaryDeserializer(host).visit("model", other)
    assert (other.last[0].device.type, other.last[1][0].device.type) == ("cuda", "cuda")
    assert other.seen.device.type == "cpu"
    assert other.seen.tolist() == [1, 1]
