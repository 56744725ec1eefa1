"""Layouts: which tensors travel, in which order and how; and the hash that tells two of them apart."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbat.errors import ConfigError, WireError
from fedbat.layout import Entry, Layout, layout_of, tensors_of, tied_names, whole_layout
from fedbat.models import build_model


class Everything(nn.Module):
    """One tensor of every sort."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.head.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.bf16 = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.register_buffer("table", torch.ones(2, 2))
        self.register_buffer("scratch", torch.ones(7), persistent=False)


def roles_of(model, roles=None):
    return {entry.name: entry.role for entry in layout_of(model, roles)}


def test_default_policy():
    assert roles_of(Everything()) == {
        "gain": "dense",
        "bf16": "compress",
        "conv.weight": "compress",
        "conv.bias": "dense",
        "norm.weight": "dense",
        "norm.bias": "dense",
        "head.weight": "compress",
        "head.bias": "dense",
        "mask": "max",
        "table": "dense",
        "norm.running_mean": "dense",
        "norm.running_var": "dense",
        "norm.num_batches_tracked": "max",
    }


def test_wire_order_is_parameters_then_buffers_as_the_model_lists_them():
    model = Everything()
    layout = layout_of(model)
    sent = [entry.name for entry in layout]
    listed = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    assert sent == [name for name in listed if name in sent]
    assert [*layout.compressed, *layout.rest] == sorted(layout, key=lambda entry: entry.role != "compress")


def test_entries_describe_the_tensors():
    model = Everything()
    layout = layout_of(model)
    for name, tensor in tensors_of(model, layout).items():
        (entry,) = (entry for entry in layout if entry.name == name)
        assert (entry.dtype, entry.shape, entry.numel) == (tensor.dtype, tensor.shape, tensor.numel())


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
    + [(dtype, dtype) for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)],
)
def test_halves_travel_as_float32_all_else_as_it_is(dtype, wire):
    entry = Entry("x", "dense", dtype, torch.Size([3, 2]))
    assert entry.wire_dtype == wire and entry.nbytes == 6 * wire.itemsize


def test_models_of_the_paper_compress_their_weights_and_nothing_else():
    for name, num_layers in (("cnn", 5), ("resnet10", 13), ("resnet10-narrow", 13)):
        model = build_model(name, (3, 32, 32), 10, seed=0)
        layout = layout_of(model)
        assert len(layout.compressed) == num_layers
        assert all(entry.name.endswith("weight") for entry in layout.compressed)
        assert len(layout) == len(model.state_dict())


def test_tensors_of_shares_memory_with_the_model():
    model = Everything()
    live = tensors_of(model, layout_of(model))
    with torch.no_grad():
        for tensor in live.values():
            tensor.zero_()
    assert not any(tensor.requires_grad for tensor in live.values())
    assert not model.head.weight.any() and not model.norm.running_var.any() and model.frozen.weight.any()


def test_roles_override_the_policy():
    roles = roles_of(
        Everything(),
        {"head.*": "dense", "frozen.weight": "compress", "norm.*": "skip", "mask": "skip", "gain": "compress"},
    )
    assert roles["head.weight"] == roles["head.bias"] == "dense"
    assert roles["frozen.weight"] == roles["gain"] == "compress" and "frozen.bias" not in roles
    assert not any(name.startswith(("norm", "mask")) for name in roles)
    assert roles["conv.weight"] == "compress"  # the rest keeps its default


def test_what_has_no_elements_is_not_compressed():
    model = nn.Sequential(nn.Linear(2, 2))
    model.none = nn.Parameter(torch.zeros(0, 3))
    assert roles_of(model, {})["none"] == roles_of(model, {"*": "compress"})["none"] == "dense"
    with pytest.raises(ConfigError, match="none has no elements"):
        layout_of(model, {"none": "compress"})


def test_the_last_matching_pattern_wins():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    roles = roles_of(model, {"*": "dense", "*num_batches_tracked": "max", "0.*": "skip", "0.weight": "compress"})
    assert roles == {
        "0.weight": "compress",
        "1.weight": "dense",
        "1.bias": "dense",
        "1.running_mean": "dense",
        "1.running_var": "dense",
        "1.num_batches_tracked": "max",
    }


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"head.weigth": "dense"}, "'head.weigth', which matches no tensor"),
        ({"scratch": "dense"}, "'scratch', which matches no tensor"),  # not persistent
        ({"head.weight": "signs"}, "role of head.weight is 'signs'; choose from compress, dense, max, skip"),
        ({"head.weight": "max"}, "head.weight holds floats and cannot have role 'max'"),
        ({"mask": "dense"}, "mask holds integers and cannot have role 'dense'"),
        ({"norm.num_batches_tracked": "compress"}, "holds integers and cannot have role 'compress'"),
        ({"table": "compress"}, "table is a buffer, only parameters can be compressed"),
        ({"*": "skip"}, "nothing to send"),
    ],
)
def test_roles_that_cannot_be(roles, message):
    with pytest.raises(ConfigError, match=message) as caught:
        layout_of(Everything(), roles)
    assert "; " in str(caught.value)


def test_a_model_without_anything_to_send():
    for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ConfigError, match="nothing to send"):
            layout_of(model)


@pytest.mark.parametrize("where", ["parameter", "buffer"])
def test_complex_tensors_are_refused_unless_they_stay_home(where):
    model = nn.Linear(2, 2)
    value = torch.ones(2, 2, dtype=torch.complex64)
    model.register_parameter("z", nn.Parameter(value)) if where == "parameter" else model.register_buffer("z", value)
    for roles in (None, {"z": "dense"}, {"z": "max"}):
        with pytest.raises(ConfigError, match="z is complex, only real tensors"):
            layout_of(model, roles)
    assert "z" not in roles_of(model, {"z": "skip"})
    if where == "parameter":
        model.z.requires_grad_(False)
        assert "z" not in roles_of(model)


def test_memory_format_device_and_values_do_not_enter_the_hash():
    model = build_model("cnn", (1, 28, 28), 10, seed=0)
    other = build_model("cnn", (1, 28, 28), 10, seed=1).to(memory_format=torch.channels_last)
    on_meta = copy.deepcopy(model).to("meta")
    assert layout_of(model).hash == layout_of(other).hash == layout_of(on_meta).hash


BASE = Layout(
    [
        Entry("a", "compress", torch.float32, torch.Size([2, 3])),
        Entry("b", "dense", torch.float32, torch.Size([6])),
        Entry("c", "max", torch.int64, torch.Size([])),
    ]
)

CHANGES = {
    "name": (BASE[0]._replace(name="A"), *BASE[1:]),
    "role": (BASE[0]._replace(role="dense"), *BASE[1:]),
    "dtype": (BASE[0]._replace(dtype=torch.bfloat16), *BASE[1:]),
    "shape": (BASE[0]._replace(shape=torch.Size([3, 2])), *BASE[1:]),
    "dimensions": (BASE[0]._replace(shape=torch.Size([2, 3, 1])), *BASE[1:]),
    "scalar or vector": (*BASE[:2], BASE[2]._replace(shape=torch.Size([1]))),
    "order": (BASE[1], BASE[0], BASE[2]),
    "one less": BASE[:2],
    "one more": (*BASE, Entry("d", "dense", torch.float32, torch.Size([0]))),
    "none": (),
}


def test_every_change_changes_the_hash():
    hashes = {BASE.hash, *(Layout(change).hash for change in CHANGES.values())}
    assert len(hashes) == 1 + len(CHANGES)
    assert all(len(digest) == 8 for digest in hashes)
    assert Layout(BASE).hash == BASE.hash


entries = st.builds(
    Entry,
    st.text("ab.1,", max_size=4),
    st.sampled_from(["compress", "dense", "max"]),
    st.sampled_from([torch.float32, torch.float16, torch.int8, torch.bool]),
    st.lists(st.integers(0, 12), max_size=3).map(torch.Size),
)


@given(st.lists(entries, max_size=3), st.lists(entries, max_size=3))
@settings(deadline=None)
def test_layouts_are_equal_exactly_when_their_hashes_are(one, other):
    assert (Layout(one).hash == Layout(other).hash) == (one == other)
    assert Layout(one).hash == Layout(copy.deepcopy(one)).hash


def test_a_pattern_leaves_integer_buffers_and_float_buffers_where_they_belong():
    """ "head.*" is written for the weights of a head; its BatchNorm counters cannot travel as floats."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    dense = {e.name: e.role for e in layout_of(model, {"*": "dense"})}
    assert dense["0.weight"] == "dense" and dense["1.num_batches_tracked"] == "max"
    packed = {e.name: e.role for e in layout_of(model, {"1.*": "compress"})}
    assert packed["1.weight"] == "compress" and packed["1.running_mean"] == "dense"
    with pytest.raises(ConfigError, match="holds integers"):
        layout_of(model, {"1.num_batches_tracked": "dense"})


def test_a_layout_is_read_from_its_text():
    layout = layout_of(Everything())
    again = Layout.from_text(layout.text)
    assert again == layout and again.hash == layout.hash


def test_a_layout_prints_as_a_table():
    model = nn.Sequential(nn.Linear(100, 20), nn.BatchNorm1d(20))
    assert str(layout_of(model, {"1.bias": "skip"})).splitlines() == [
        "role      shape     name                   bytes",
        "compress  20 x 100  0.weight               8,000",
        "dense     20        0.bias                    80",
        "dense     20        1.weight                  80",
        "dense     20        1.running_mean            80",
        "dense     20        1.running_var             80",
        "max       1         1.num_batches_tracked      8",
    ]


@pytest.mark.parametrize(
    "line",
    ["", "compress\tfloat32\t2,3", "keep\tfloat32\t2,3\tw", "dense\tcomplex64\t2,3\tw", "dense\tnn\t2\tw"]
    + [f"dense\tfloat32\t{sizes}\tw" for sizes in ("-1", "2,", "2;3", "x", "02", "2,,3")]
    + [f"compress\tfloat32\t{sizes}\tw" for sizes in ("9" * 5000, f"0,{2**63}", f"{2**32},{2**32}", f"{2**62},2")],
)
def test_a_damaged_text_is_refused(line):
    with pytest.raises(WireError, match="expected role, type, sizes and name"):
        Layout.from_text(line + "\n")


def test_the_whole_layout_has_every_tensor_of_the_state_dict():
    model = Everything()
    layout = layout_of(model, {"conv.bias": "skip", "mask": "skip"})
    whole = whole_layout(model, layout)
    assert [entry.name for entry in whole] == list(model.state_dict())  # apps may load by position
    assert set(layout) <= set(whole)
    more = {entry.name: entry.role for entry in whole if entry not in layout}
    frozen = {"frozen.weight": "dense", "frozen.bias": "dense"}
    assert more == {"conv.bias": "dense", "mask": "max", "tied.weight": "compress", **frozen}
    assert whole_layout(model.conv, layout_of(model.conv)) == layout_of(model.conv)


def test_names_of_any_letters_are_found_and_told():
    odd = ["a[0]", "b*", "c\r", "d\x0c", "e\u2028", "f g"]
    model = nn.ModuleDict({key: nn.Linear(2, 2) for key in odd})
    layout = layout_of(model)
    assert Layout.from_text(layout.text) == layout
    dense = layout_of(model, {f"{key}.weight": "dense" for key in odd})
    assert not dense.compressed and len(dense) == 2 * len(odd)


@pytest.mark.parametrize("letter", ["\t", "\n"])
def test_names_that_no_line_could_tell_are_refused(letter):
    with pytest.raises(ConfigError, match="holds a tab or a line break"):
        layout_of(nn.ModuleDict({f"a{letter}b": nn.Linear(2, 2)}))


def test_types_that_do_not_travel_are_refused_unless_they_stay_home():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match=r"scale is torch.float8_e4m3fn, .* role 'skip'"):
        layout_of(model)
    assert len(layout_of(model, {"scale": "skip"})) == 2


def test_tied_weights_go_by_any_of_their_names():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9, bias=False))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight", "1.*"):
        assert [(entry.name, entry.role) for entry in layout_of(model, {name: "dense"})] == [("0.weight", "dense")]


def test_a_layout_of_another_model_is_refused():
    layout = layout_of(nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"weight of shape \[3, 4\], this model has \[3, 5\]"):
        tensors_of(nn.Linear(5, 3), layout)
    with pytest.raises(ConfigError, match=r"this model has nothing"):
        tensors_of(nn.Sequential(nn.Linear(4, 3)), layout)


def test_a_norm_that_two_parts_share_travels_once_with_its_buffers():
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 4), norm), "b": nn.Sequential(nn.Linear(3, 4), norm)})
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert tied_names(model) == {f"b.1.{kind}": f"a.1.{kind}" for kind in kinds}
    assert not any(entry.name.startswith("b.1.") for entry in layout_of(model))
