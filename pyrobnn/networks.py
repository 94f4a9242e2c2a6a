"""Small networks for studies and examples: plain ``nn.Module`` objects, free of batch norm and dropout."""

from pyrobnn.model.architectures import ACTIVATIONS as ACTIVATIONS
from pyrobnn.model.architectures import Exposed, mlp, small_cnn
from pyrobnn.model.architectures import Temperature as Temperature
from pyrobnn.model.several_inputs import SeveralInputs

__all__ = ["Exposed", "SeveralInputs", "mlp", "small_cnn"]
