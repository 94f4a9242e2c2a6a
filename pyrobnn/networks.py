"""Small networks for studies and examples: plain ``nn.Module`` objects, free of batch norm and dropout."""

from pyrobnn.model.architectures import Exposed, mlp, small_cnn

__all__ = ["Exposed", "mlp", "small_cnn"]
