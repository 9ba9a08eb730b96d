"""From rows and answers to a batch of exactly the tokens that were sampled."""

from __future__ import annotations
import logging
import math
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.packer.data_packer import DataPacker
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_model import build_tiny_model

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
RENDERED = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(str(build_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def packer(tokenizer: Any) -> DecoderOnlyLLMDataPacker:
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=tokenizer)
    return packer


def recorded_sample(
    turns: int = 1, *, prompt: int = 3, answer: int = 4, observation: int = 2, reward: float = 1.0
) -> Sample:
    """A sample of ``turns`` answers with environment text between."""
    sample = Sample(7, group_index=2, metadata={"task_id": "t7"})
    sample.append(range(10, 10 + prompt))
    for turn in range(turns):
        if turn:
            sample.append([50] * observation)
        sample.append(range(20, 20 + answer), logprobs=[-0.5] * answer, versions=[turn] * answer, sampled=True)
    sample.reward = reward
    return sample


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_text_row_is_the_prompt(packer: DataPacker) -> None:
    """D3, D10."""
    assert packer.get_rollout_input("Tell a joke") == "Tell a joke"


def test_a_conversation_becomes_text_through_the_template(packer: DataPacker) -> None:
    """D11."""
    assert packer.get_rollout_input(MESSAGES) == RENDERED


def test_a_dict_row_reaches_the_workflow_unchanged(packer: DataPacker) -> None:
    row = {"prompt": MESSAGES, "answer": "Paris"}
    assert packer.get_rollout_input(row) is row


def test_template_and_its_variables_come_from_the_config(tokenizer: Any) -> None:
    packer = DecoderOnlyLLMDataPacker()
    template = "{{ messages[0]['content'] }}|{{ mood }}|{{ add_generation_prompt }}"
    config = DatasetConfig(path="x", apply_chat_template_kwargs={"chat_template": template, "mood": "calm"})
    packer.setup(tokenizer=tokenizer, config=config)
    assert packer.get_rollout_input(MESSAGES) == "What is the capital of France?|calm|True"


@pytest.mark.parametrize("row", [None, 3, []])
def test_a_row_of_another_kind_is_refused(packer: DataPacker, row: Any) -> None:
    with pytest.raises(ConfigError, match="must be text or a list of messages"):
        packer.get_rollout_input(row)


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    bare = load_tokenizer(str(build_tiny_model(tmp_path)))
    bare.chat_template = None
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=bare)
    with pytest.raises(ConfigError, match="has no chat template"):
        packer.get_rollout_input(MESSAGES)


def test_messages_are_refused_if_the_template_is_off(tokenizer: Any) -> None:
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=tokenizer, config=DatasetConfig(path="x", apply_chat_template=False))
    assert packer.get_rollout_input("Tell a joke") == "Tell a joke"
    with pytest.raises(
        ConfigError, match="apply_chat_template is false, and the prompt in .*: give text, or set apply_chat_template"
    ):
        packer.get_rollout_input(MESSAGES)


def test_messages_the_template_refuses_are_named(tokenizer: Any) -> None:
    packer = DecoderOnlyLLMDataPacker()
    config = DatasetConfig(path="x", apply_chat_template_kwargs={"chat_template": "{{ messages[9].role.x }}"})
    packer.setup(tokenizer=tokenizer, config=config)
    with pytest.raises(ConfigError, match="cannot write .*capital of France"):
        packer.get_rollout_input(MESSAGES)


def test_recorded_tokens_are_kept_unchanged(packer: DecoderOnlyLLMDataPacker) -> None:
    """D5, D13: no second tokenization."""
    sample = recorded_sample(turns=2)
    trained = packer.get_policy_input({"prompt": "not read"}, sample)
    assert trained.input_ids.tolist() == list(sample.tokens)
    assert trained.loss_mask.tolist() == [bool(x) for x in sample.loss_mask]
    assert trained.logprobs is not None
    assert trained.versions is not None
    assert trained.logprobs.tolist() == [0] * 3 + [-0.5] * 4 + [0] * 2 + [-0.5] * 4
    assert trained.versions.tolist() == [-1] * 3 + [0] * 4 + [-1] * 2 + [1] * 4
    assert (trained.reward, trained.group_id, trained.task_id) == (1.0, "2", "t7")


@pytest.mark.parametrize("output", [list(b"Paris"), "Paris"])
@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ("Capital?", "Capital?"),
        (MESSAGES, RENDERED),
        ({"prompt": MESSAGES, "answer": "Paris"}, RENDERED),
        (Sample(prompt=MESSAGES), RENDERED),
    ],
)
def test_ids_or_text_make_a_single_turn(
    packer: DecoderOnlyLLMDataPacker, tokenizer: Any, row: Any, prompt: str, output: Any
) -> None:
    """D13, D14: the mask is aligned to the token itself, and as long as the ids."""
    answer = ids(tokenizer, output) if isinstance(output, str) else output
    trained = packer.get_policy_input(row, output)
    assert trained.input_ids.tolist() == ids(tokenizer, prompt) + answer
    assert trained.input_ids[trained.loss_mask].tolist() == answer
    assert len(trained.loss_mask) == len(trained.input_ids)
    assert (trained.logprobs, trained.versions) == (None, None)


def test_text_is_tokenized_without_added_special_tokens(tokenizer: Any) -> None:
    """D13."""
    from tokenizers.processors import TemplateProcessing

    greedy = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    greedy.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=greedy)
    assert 0 in greedy("a")["input_ids"]
    assert 0 not in packer.get_policy_input("a", "b").input_ids


def test_the_tools_of_a_row_are_rendered(tokenizer: Any) -> None:
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    packer = DecoderOnlyLLMDataPacker()
    config = DatasetConfig(path="x", apply_chat_template_kwargs={"chat_template": template})
    packer.setup(tokenizer=tokenizer, config=config)
    row = {"prompt": MESSAGES, "tools": [{"type": "function", "function": {"name": "add"}}]}
    assert tokenizer.decode(packer.get_policy_input(row, [5]).input_ids[:-1]) == "add"


@pytest.mark.parametrize(
    ("row", "reward"),
    [("a", 0.0), ({"prompt": "a"}, 0.0), ({"prompt": "a", "reward": 0.5}, 0.5)],
)
def test_ids_and_text_get_the_rows_reward(packer: DecoderOnlyLLMDataPacker, row: Any, reward: float) -> None:
    assert packer.get_policy_input(row, [5]).reward == reward


def test_a_recorded_sample_without_a_reward_is_refused(packer: DataPacker) -> None:
    sample = recorded_sample()
    sample.reward = None
    with pytest.raises(ValueError, match="sample 7: the reward is None"):
        packer.get_policy_input("a", sample)


@pytest.mark.parametrize("output", [("a",), None, 3, b"Paris", np.array([1])])
def test_an_output_of_another_kind_is_refused(packer: DataPacker, output: Any) -> None:
    """D14."""
    with pytest.raises(TypeError, match=f"not {type(output).__name__}"):
        packer.get_policy_input("a", output)


def test_a_row_without_its_prompt_column_is_refused(packer: DataPacker) -> None:
    with pytest.raises(ConfigError, match=r"columns \['question'\], but no 'prompt': set .*prompt_key"):
        packer.get_policy_input({"question": "a"}, "b")


def test_an_empty_prompt_is_refused(packer: DataPacker) -> None:
    with pytest.raises(ValueError, match="True at the first token"):
        packer.get_policy_input("", [5, 6])


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_first_tokens_of_an_answer_can_be_masked(packer: DecoderOnlyLLMDataPacker, k: int) -> None:
    """D13."""
    for output in (list(b"Rome"), recorded_sample()):
        trained = packer.get_policy_input("abc", output, n_ignore_prefix_tokens=k)
        assert trained.loss_mask.tolist() == [False] * (3 + k) + [True] * (4 - k)


@pytest.mark.parametrize("k", [-1, 5])
def test_masking_more_tokens_than_the_answer_has_is_refused(packer: DecoderOnlyLLMDataPacker, k: int) -> None:
    with pytest.raises(ValueError, match=f"is {k}: the answer has 4 tokens to train, so it must be from 0 to 4"):
        packer.get_policy_input("abc", list(b"Rome"), n_ignore_prefix_tokens=k)


def test_missing_log_probs_are_nan_beside_recorded_ones_and_absent_alone(
    packer: DecoderOnlyLLMDataPacker,
) -> None:
    sample = recorded_sample()
    sample.append([30, 31], sampled=True)
    logprobs = packer.get_policy_input("a", sample).logprobs
    assert logprobs is not None
    assert [math.isnan(x) for x in logprobs] == [False] * 7 + [True] * 2
    sample = recorded_sample()
    sample.append([30, 31], sampled=True, trained=False)
    logprobs = packer.get_policy_input("a", sample).logprobs
    assert logprobs is not None
    assert logprobs[-2:].tolist() == [0, 0]  # no NaN where nothing trains


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_as_many_tokens_train_as_were_sampled(shapes: list[tuple[int, int, int, int]], extra: int) -> None:
    """Single- and multi-turn, through the batch: the masked tokens are the sampled ones."""
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=Padding(pad_token_id=0))
    samples = [
        recorded_sample(turns, prompt=prompt, answer=answer, observation=observation)
        for turns, prompt, answer, observation in shapes
    ]
    processed = [packer.get_policy_input({}, sample) for sample in samples]
    length = packer.policy_compute_max_len(processed) + extra
    batch = packer.policy_collate_fn(processed, length)

    assert batch["input_ids"].shape == (len(samples), length)
    assert batch["loss_mask"].sum() == sum(turns * answer for turns, _, answer, _ in shapes)
    for row, (turns, _, answer, _) in enumerate(shapes):
        sampled = batch["input_ids"][row][batch["loss_mask"][row]]
        assert sampled.tolist() == list(range(20, 20 + answer)) * turns


class Padding:
    """The attributes of a tokenizer that collation reads."""

    name_or_path = "tiny"
    eos_token = "<eos>"

    def __init__(self, *, pad_token_id: int | None = None, eos_token_id: int | None = None) -> None:
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id


def test_a_batch_is_padded_on_the_right_to_the_given_length(packer: DecoderOnlyLLMDataPacker) -> None:
    """D6, D7, D15."""
    processed = [packer.get_policy_input({}, recorded_sample(answer=n)) for n in (2, 4)]
    assert packer.policy_compute_max_len(processed) == 7
    batch = packer.policy_collate_fn(processed, 8)
    assert batch["input_ids"].tolist() == [
        [10, 11, 12, 20, 21, 0, 0, 0],
        [10, 11, 12, 20, 21, 22, 23, 0],
    ]
    assert batch["attention_mask"].int().tolist() == [[1] * 5 + [0] * 3, [1] * 7 + [0]]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["group_ids"].tolist() == ["2", "2"]
    assert batch["input_ids"].device.type == "cpu"


def test_a_length_below_the_longest_sequence_is_refused(packer: DecoderOnlyLLMDataPacker) -> None:
    """D15: upstream truncates silently."""
    processed = [packer.get_policy_input({}, recorded_sample())]
    with pytest.raises(ValueError, match="computed_max_len is 6, but the longest sequence has 7 tokens"):
        packer.policy_collate_fn(processed, 6)


def test_the_longest_of_no_sequences_is_an_error(packer: DataPacker) -> None:
    with pytest.raises(ValueError, match="there are no sequences"):
        packer.policy_compute_max_len([])
    with pytest.raises(ValueError, match="there are no sequences"):
        packer.policy_collate_fn([], 8)


def test_without_a_padding_token_the_end_token_pads_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=Padding(eos_token_id=9))
    processed = [packer.get_policy_input({}, recorded_sample())]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert packer.policy_collate_fn(processed, 8)["input_ids"][0, -1] == 9
    assert [record.message for record in caplog.records] == [
        "tokenizer tiny has no pad_token: batches are padded with its eos_token '<eos>'"
    ]


def test_a_tokenizer_without_padding_and_end_token_is_refused() -> None:
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=Padding())
    with pytest.raises(ConfigError, match="neither a pad_token nor an eos_token"):
        packer.policy_collate_fn([packer.get_policy_input({}, recorded_sample())], 8)
