"""The server: federated averaging, tested centrally."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from migrate.task import Net, load_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    global_model = Net()
    strategy = FedAvg(fraction_train=context.run_config["fraction-train"], fraction_evaluate=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(global_model.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy of the global model."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    _, testloader = load_data(0, 1)
    return MetricRecord({"accuracy": test(model, testloader, torch.device("cpu"))})
