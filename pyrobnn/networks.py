"""Small networks for studies and examples: plain ``nn.Module`` objects, free of batch norm and dropout."""

from pyrobnn.model.architectures import ACTIVATIONS as ACTIVATIONS
from pyrobnn.model.architectures import Exposed, mlp, small_cnn
from pyrobnn.model.architectures import Temperature as Temperature

__all__ = ["Exposed", "mlp", "small_cnn"]
