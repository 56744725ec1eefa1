"""Federated learning that sends one bit per weight.

On a client: `local = begin(method, model, optimizer, num_steps)`, train as usual, `local.finish().to_bytes()`.
On the server: `server = Server(method, model)`, `server.add(raw, weight)`, `server.step()`.
All of it on one machine: `for round_, state in simulate(Experiment(method="fedbat"))`.
"""

from fedbat.errors import ConfigError, DataError, DivergedError, FedbatError, MethodError, WireError
from fedbat.experiment import Experiment
from fedbat.layout import Layout, layout_of
from fedbat.method import Method
from fedbat.methods import METHODS, make_method
from fedbat.methods.bifl import BiFL, BiFLFull
from fedbat.methods.drive import DRIVE
from fedbat.methods.eden import EDEN
from fedbat.methods.ef_signsgd import EFSignSGD
from fedbat.methods.fedavg import FedAvg
from fedbat.methods.fedbat import FedBAT
from fedbat.methods.fedmrn import FedMRN
from fedbat.methods.fedpaq import FedPAQ
from fedbat.methods.noisy_signsgd import NoisySignSGD
from fedbat.methods.signsgd import SignSGD
from fedbat.methods.stoc_signsgd import StocSignSGD
from fedbat.methods.zerofl import ZeroFL
from fedbat.run import simulate
from fedbat.server import Aggregator, Server
from fedbat.streams import UniformNoise
from fedbat.training import LocalTraining, Upload, begin
from fedbat.wire import Payload

__all__ = [
    "DRIVE",
    "EDEN",
    "METHODS",
    "Aggregator",
    "BiFL",
    "BiFLFull",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EFSignSGD",
    "Experiment",
    "FedAvg",
    "FedBAT",
    "FedMRN",
    "FedPAQ",
    "FedbatError",
    "Layout",
    "LocalTraining",
    "Method",
    "MethodError",
    "NoisySignSGD",
    "Payload",
    "Server",
    "SignSGD",
    "StocSignSGD",
    "UniformNoise",
    "Upload",
    "WireError",
    "ZeroFL",
    "begin",
    "layout_of",
    "make_method",
    "simulate",
]
