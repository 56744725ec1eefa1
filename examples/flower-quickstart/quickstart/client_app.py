"""A client: PyTorch's usual loop, with the optimizer hooked by `begin`."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F

from fedbat.flower import begin, fedbat_mod
from fedbat.streams import stream_seed
from quickstart.task import new_model, train_batches

app = ClientApp(mods=[fedbat_mod])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the global model on this client's data."""
    node, config = context.node_config, context.run_config
    round_ = msg.content["config"]["server-round"]
    torch.manual_seed(stream_seed(config["seed"], "quickstart", round_, node["partition-id"]))  # of the batches' order
    batches = train_batches(node["partition-id"], node["num-partitions"], config["batch-size"])
    model = new_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    begin(model, optimizer, num_steps=config["local-epochs"] * len(batches))
    model.train()
    for _ in range(config["local-epochs"]):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train-loss": loss.item(), "num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)  # fedbat_mod puts the packed update in the place of the arrays
