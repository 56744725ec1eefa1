"""Client memories on a budget: always what a plain dict would hold, in RAM or not."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.errors import ConfigError, MethodError
from fedbat.memories import Memories, half_of_ram
from fedbat.storage import load_tensors, save_tensors

SIZE = 4 * 10  # bytes of one memory below


def memory(value):
    return {"w": torch.full((2, 5), float(value))}


def content(memories):
    return {client: tensors["w"][0, 0].item() for client, tensors in memories.items()}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 6), max_size=4), st.booleans(), st.booleans()), max_size=8),
    st.sampled_from([0, SIZE, 3 * SIZE, math.inf]),
)
def test_rounds_checkpoints_and_crashes_leave_what_a_dict_would_hold(script, budget):
    """Each round some clients remember; then it may fail, or be followed by a checkpoint that survives all else."""
    value = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memories, expected = Memories(folder, budget), {}
        saved, at_checkpoint = {}, {}
        for clients, fails, checkpoints in script:
            after = memories.begin()
            for client in sorted(clients):
                value += 1
                after.remember(client, memory(value))
                assert after[client]["w"][0, 0] == value
            assert content(memories) == expected  # a round that has only begun changes nothing
            assert memories._store.num_bytes <= max(budget, SIZE)
            if not fails:
                memories, expected = after, content(after)
            if checkpoints:
                saved, at_checkpoint = memories.write(folder), expected
                memories.release_others()
                assert len(list(folder.iterdir())) == len(memories)
        assert content(memories) == expected
        assert content(Memories(folder, budget, saved)) == at_checkpoint


def test_only_what_does_not_fit_is_on_disk_and_what_is_superseded_goes(tmp_path):
    memories = Memories(tmp_path, budget=2 * SIZE)
    for number in range(5):
        memories = memories.begin()
        for client in range(4):
            memories.remember(client, memory(10 * number + client))
    memories = memories.begin()
    assert memories._store.num_bytes == 2 * SIZE and len(list(tmp_path.iterdir())) == 2
    assert content(memories) == {client: 40 + client for client in range(4)}


def test_a_memory_is_written_once(tmp_path):
    memories = Memories(tmp_path).begin()
    for client in range(3):
        memories.remember(client, memory(client))
    memories.write(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    memories = memories.begin()
    memories.remember(1, memory(7))
    memories.write(tmp_path)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert before.items() <= after.items() and len(after) == len(before) + 1


def test_without_a_folder_a_temporary_one_takes_what_does_not_fit():
    memories = Memories(budget=0).begin()
    for client in range(3):
        memories.remember(client, memory(client))
    folder = memories._store.folder
    assert content(memories) == {0: 0, 1: 1, 2: 2} and len(list(folder.iterdir())) == 3
    with pytest.raises(ConfigError, match="make them with Memories"):
        memories.write(folder / "elsewhere")
    del memories
    assert not folder.exists()


def test_a_folder_is_made_when_it_is_needed(tmp_path):
    memories = Memories(tmp_path / "a" / "b", budget=0).begin()
    assert not (tmp_path / "a").exists()
    for client in range(2):
        memories.remember(client, memory(client))
    assert content(memories) == {0: 0, 1: 1}


def test_what_is_not_on_disk_yet_may_be_written_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = Memories(Path("a"))
    assert empty.write(tmp_path / "b") == empty.write(tmp_path / "c") == {}
    memories = Memories(Path("a")).begin()
    memories.remember(0, memory(7))
    memories.write(tmp_path / "b")
    memories.write(Path("b"))  # the same folder
    with pytest.raises(ConfigError, match="make them with Memories"):
        memories.write(tmp_path / "c")


@pytest.mark.parametrize("budget", [0, math.inf])
def test_what_was_forgotten_is_told(tmp_path, budget):
    old = Memories(tmp_path, budget).begin()
    for client in range(3):
        old.remember(client, memory(client))
    new = old.begin()
    new.remember(0, memory(9))
    assert content(old) == {0: 0, 1: 1, 2: 2}
    new.begin()
    for use in (content, Memories.begin, lambda memories: memories.write(tmp_path)):
        with pytest.raises(MethodError, match="go on from the newest state"):
            use(old)
    assert content(new) == {0: 9, 1: 1, 2: 2}


def test_files_keep_bits_types_and_memory_formats(tmp_path, rng):
    x = torch.randn(4, 3, 5, 2, generator=rng)
    tensors = {
        "plain": x, "channels_last": x.to(memory_format=torch.channels_last), "turned": x.clone().transpose(0, 3),
        "scalar": torch.tensor(3.0), "integer": torch.arange(5), "half": x.bfloat16(), "empty": x[:0],
        "nan": torch.tensor([math.nan, -0.0, math.inf]), "strided": x[::2, :, ::2],
    }  # fmt: skip
    save_tensors(tmp_path / "x", tensors)
    found = load_tensors(tmp_path / "x")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(torch.nan_to_num(found[name]), torch.nan_to_num(tensor)), name
        if name != "strided":  # which has gaps in memory
            assert found[name].stride() == tensor.stride(), name
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_default_budget_is_a_share_of_the_machine():
    assert 2**28 < half_of_ram() <= math.inf
