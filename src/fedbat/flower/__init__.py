"""One-bit updates in Flower: `pip install '.[flower]'` in a clone.

Server:  strategy = Compressed(FedAvg(...), FedBAT(), model)
Client:  app = ClientApp(mods=[fedbat_mod]), and in the training function, once the optimizer is made,
         begin(model, optimizer, num_steps=epochs * len(trainloader))
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("fedbat.flower needs Flower 1.41 or newer; pip install 'flwr[simulation]>=1.41,<2'") from error

from fedbat.flower.client import begin, fedbat_mod
from fedbat.flower.strategy import Compressed

__all__ = ["Compressed", "begin", "fedbat_mod"]
