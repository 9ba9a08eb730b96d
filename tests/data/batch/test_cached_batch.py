"""V31: each step is generated once and later read from its file, unless settings changed."""

import numpy as np
import pytest
import torch
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.data_proto_file import BatchCache
from areal_lite.errors import ConfigError


class Rollout:
    """Makes a different batch each time, and counts them."""

    made = 0

    def __call__(self):
        self.made += 1
        return DataProto.from_dict(
            {"rewards": torch.tensor([float(self.made), 0.5])},
            {"group_ids": ["a", "a"]},
            {"version": self.made},
        )


def test_a_second_run_reads_the_batches_of_the_first(tmp_path):
    make = Rollout()
    first, again = (
        [BatchCache(tmp_path / "cache", {"seed": 1, "betas": (0.9, 1)}).batch(step, make) for step in (1, 2)]
        for _ in range(2)
    )
    assert make.made == 2
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "step_1.safetensors",
        "step_2.safetensors",
    ]
    for made, read in zip(first, again, strict=True):
        torch.testing.assert_close(read.batch["rewards"], made.batch["rewards"], rtol=0, atol=0)
        np.testing.assert_array_equal(read.non_tensor_batch["group_ids"], made.non_tensor_batch["group_ids"])
        assert read.meta_info == made.meta_info
    assert first[0].meta_info != first[1].meta_info


def test_batches_of_another_config_are_refused_with_the_differences(tmp_path):
    BatchCache(tmp_path, {"temperature": 1.0, "seed": 1, "old": 3}).batch(1, Rollout())
    with pytest.raises(
        ConfigError, match=r"temperature was 1.0 and is 0.5; old was 3 and is None. Restore these values"
    ):
        BatchCache(tmp_path, {"temperature": 0.5, "seed": 1})


def test_the_folder_is_made_at_the_start(tmp_path):
    BatchCache(tmp_path / "deep" / "cache", {})
    assert (tmp_path / "deep" / "cache").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="rollout_cache '.*file' cannot be created: .*: choose another folder"):
        BatchCache(tmp_path / "file", {})


def test_a_rollout_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="server"):
        BatchCache(tmp_path, {}).batch(1, lambda: (_ for _ in ()).throw(RuntimeError("server")))
    assert not list(tmp_path.iterdir())
