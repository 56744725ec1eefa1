"""The server: Flower's FedAvg, with the updates compressed."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedbat import make_method
from fedbat.flower import Compressed
from quickstart.task import evaluate, new_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, testing the global model after each."""
    config = context.run_config
    model = new_model(config["seed"])
    strategy = Compressed(
        FedAvg(
            fraction_train=config["fraction-train"],
            fraction_evaluate=0.0,  # the server tests, so that the model travels once a round
            min_available_nodes=config["min-nodes"],
            min_train_nodes=config["min-nodes"],
        ),
        make_method(config["method"]),
        model,
        seed=config["seed"],
        timeout=config["timeout"],
        down=config["down"],
        average=config["average"],
        checkpoint=config["checkpoint"] or None,
    )

    def accuracy(arrays: ArrayRecord) -> float:
        model.load_state_dict(arrays.to_torch_state_dict())
        return evaluate(model)

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Of the server's model, of what clients have of it, and of its average if one is kept."""
        found = {"accuracy": accuracy(arrays), "received": accuracy(strategy.received)}
        if strategy.averaged is not None:
            found["averaged"] = accuracy(strategy.averaged)
        return MetricRecord(found)

    strategy.start(grid, ArrayRecord(model.state_dict()), config["num-server-rounds"], evaluate_fn=test)
