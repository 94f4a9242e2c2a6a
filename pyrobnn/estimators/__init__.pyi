from .classifier import BNNClassifier as BNNClassifier
from .pyro_program import PyroClassifier as PyroClassifier
from .pyro_program import PyroRegressor as PyroRegressor
from .regressor import BNNRegressor as BNNRegressor
