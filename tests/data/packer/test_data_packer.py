"""The five hooks, and which packer a model gets."""

from __future__ import annotations
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.packer import data_packer
from areal_lite.data.packer.data_packer import DataPacker, make_data_packer, register_data_packer
from areal_lite.errors import ConfigError

HOOKS = ["get_rollout_input", "get_policy_input", "policy_compute_max_len", "policy_collate_fn"]


class Whole(DataPacker):
    """All hooks, each calling the abstract one."""

    def get_rollout_input(self, item: Any) -> Any:
        return super().get_rollout_input(item)  # type: ignore[safe-super]

    def get_policy_input(self, sample: Any, rollout_output: Any) -> Any:
        return super().get_policy_input(sample, rollout_output)  # type: ignore[safe-super]

    def policy_compute_max_len(self, processed_samples: Any) -> int:
        return super().policy_compute_max_len(processed_samples)  # type: ignore[safe-super]

    def policy_collate_fn(self, processed_samples: Any, computed_max_len: int) -> dict[str, Any]:
        return super().policy_collate_fn(processed_samples, computed_max_len)  # type: ignore[safe-super]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_packer, "_packers", dict(data_packer._packers))
    yield


@pytest.mark.parametrize("missing", HOOKS)
def test_a_packer_without_all_hooks_cannot_be_created(missing: str) -> None:
    """D2, D8."""
    hooks = {name: getattr(Whole, name) for name in HOOKS if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Partial", (DataPacker,), hooks)()


@pytest.mark.parametrize(("hook", "arguments"), list(zip(HOOKS, [("x",), ("x", "y"), ([],), ([], 1)], strict=True)))
def test_an_abstract_hook_says_where_to_implement_it(hook: str, arguments: tuple[Any, ...]) -> None:
    """D8."""
    with pytest.raises(NotImplementedError, match=f"implement {hook} in the subclass"):
        getattr(Whole(), hook)(*arguments)


def test_rollout_inputs_are_collated_to_the_same_list() -> None:
    """D4."""
    items = ["a", "b"]
    assert Whole().rollout_collate_fn(items) is items


def test_setup_stores_tokenizer_processor_and_config() -> None:
    packer, config = Whole(), DatasetConfig(path="rows.jsonl", prompt_key="question")
    assert packer.config.prompt_key == "prompt"  # before: the defaults
    packer.setup(tokenizer="tokenizer", processor="processor", config=config)
    assert (packer.tokenizer, packer.processor, packer.config) == ("tokenizer", "processor", config)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "nobody_knows"])
def test_language_models_get_the_decoder_only_packer(model_type: str) -> None:
    """D9."""
    assert type(make_data_packer(model_type)).__name__ == "DecoderOnlyLLMDataPacker"


def test_qwen2_5_vl_gets_the_packer_of_images() -> None:
    """D12."""
    assert type(make_data_packer("qwen2_5_vl")).__name__ == "Qwen2_5_VLM_DataPacker"


def test_built_in_packers_are_imported_on_first_use() -> None:
    code = (
        "import sys\n"
        "from areal_lite.data.packer.data_packer import make_data_packer\n"
        "packers = ['areal_lite.data.packer.decoder_only_llm_packer', 'areal_lite.data.vision.qwen2_5_vlm_packer']\n"
        "assert not set(packers) & set(sys.modules)\n"
        "make_data_packer('llama').get_rollout_input('text')\n"
        "assert set(packers) & set(sys.modules) == {packers[0]}\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_registered_packer_serves_its_model_types() -> None:
    assert register_data_packer("mine", "mine_moe")(Whole) is Whole
    assert type(make_data_packer("mine")) is type(make_data_packer("mine_moe")) is Whole
    register_data_packer("mine")(Whole)  # twice is no conflict


@pytest.mark.parametrize("taken", ["llama", "theirs"])
def test_a_model_type_has_one_packer(taken: str) -> None:
    register_data_packer("theirs")(type("Theirs", (Whole,), {}))
    with pytest.raises(ConfigError, match=f"'{taken}' has the packer .* already: name yours in the YAML"):
        register_data_packer("free", taken)(Whole)
    assert type(make_data_packer("free")) is not Whole  # all or none


def test_a_dotted_path_overrides_the_model_type() -> None:
    packer = make_data_packer("llama", "areal_lite.data.vision.qwen2_5_vlm_packer.Qwen2_5_VLM_DataPacker")
    assert type(packer).__name__ == "Qwen2_5_VLM_DataPacker"


@pytest.mark.parametrize("path", ["areal_lite.data.source.sample.Sample", "areal_lite.data.source.sample.Prompt"])
def test_a_path_to_something_else_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"data_packer is '{path}': it must be a subclass"):
        make_data_packer("llama", path)


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no 'Decoder'"):
        make_data_packer("llama", "areal_lite.data.packer.decoder_only_llm_packer.Decoder")
