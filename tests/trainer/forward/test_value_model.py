from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
import torch
import transformers
from areal_lite.errors import ConfigError
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.weight_folder import write_model
from areal_lite.trainer.forward.packed_model import PackedSequences
from areal_lite.trainer.forward.scalar_model import ValueScorer, load_critic, load_reward_model
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together, sequence

CPU = torch.device("cpu")


def packed_sequences(scorer: ValueScorer, batch: Any) -> PackedSequences:
    return packed_together(batch, share=scorer.shares_prefixes)[0]


def with_drawn_head(critic: Any) -> Any:
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    return critic


def test_a_critic_from_the_policys_model_starts_with_values_of_0(
    untied: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # V49: values are there before anything was learned.
    critic = load_critic(str(untied), device=CPU)
    values = ValueScorer(critic)(packed_sequences(ValueScorer(critic), drawn_batch(0)))
    assert torch.equal(values, torch.zeros(len(values)))
    assert critic.dtype == torch.float32
    assert critic.dropout.p == 0.0
    assert not critic.training
    policy = load_policy(str(untied), device=CPU)
    torch.testing.assert_close(critic.model.state_dict(), policy.model.state_dict(), atol=0, rtol=0)
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")  # a new head is nothing to warn of


def test_a_saved_critic_keeps_its_head(tiny: Path, tmp_path: Path) -> None:
    critic = with_drawn_head(load_critic(str(tiny), device=CPU))
    write_model(critic, tmp_path, torch.float32)
    again = load_critic(str(tmp_path), device=CPU)
    torch.testing.assert_close(again.state_dict(), critic.state_dict(), atol=0, rtol=0)


def test_a_critic_from_a_reward_model_keeps_its_head(tiny: Path, tmp_path: Path) -> None:
    reward_model = load_reward_model(str(tiny), device=CPU, new_head=True)
    torch.nn.init.normal_(reward_model.score.weight)
    write_model(reward_model, tmp_path, torch.float32)
    critic = load_critic(str(tmp_path), device=CPU)
    assert torch.equal(critic.score.weight, reward_model.score.weight)
    assert critic.score.bias.tolist() == [0.0]


@pytest.mark.parametrize("window", [None, 4])
def test_values_are_read_before_each_trained_token(window: int | None) -> None:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, num_labels=1, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(0)
    critic = transformers.AutoModelForTokenClassification.from_config(config).eval()
    scorer = ValueScorer(with_drawn_head(critic))
    assert scorer.shares_prefixes
    batch = drawn_batch(1)
    with torch.no_grad():
        packed, order = packed_together(batch, share=scorer.shares_prefixes)
        values = scorer(packed)
        alone = [critic(input_ids=torch.from_numpy(one.input_ids)[None]).logits[0, :, 0] for one in order]
    expected = torch.cat([row[one.loss_mask.nonzero()[0] - 1] for row, one in zip(alone, order, strict=True)])
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


def test_autocast_does_not_round_values(tiny: Path) -> None:
    critic = load_critic(str(tiny), device=CPU)
    torch.nn.init.constant_(critic.score.bias, 3.14159)
    scorer = ValueScorer(critic)
    with torch.autocast("cpu", torch.bfloat16):
        values = scorer(packed_sequences(scorer, [sequence([5, 6, 7], [1, 2])]))
    assert values.tolist() == pytest.approx([3.14159, 3.14159], abs=1e-6)


def test_recomputing_activations_gives_the_same_gradients(tiny: Path) -> None:
    gradients = []
    for recompute in (False, True):
        critic = with_drawn_head(load_critic(str(tiny), device=CPU, gradient_checkpointing=recompute))
        scorer = ValueScorer(critic)
        assert critic.model.layers[0].gradient_checkpointing == recompute
        scorer(packed_sequences(scorer, drawn_batch(2))).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in critic.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], atol=0, rtol=0)


def test_a_folder_without_a_models_body_is_refused(tiny: Path, tmp_path: Path) -> None:
    policy = load_policy(str(tiny), device=CPU)
    kept = {name: value for name, value in policy.state_dict().items() if "layers.1" not in name}
    policy.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ConfigError, match=r"no weights for \['model.layers.1.*complete model"):
        load_critic(str(tmp_path), device=CPU)


def test_a_model_with_many_labels_is_not_a_critic(tiny: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForTokenClassification.from_pretrained(tiny, num_labels=2)
    write_model(model, tmp_path, torch.float32)
    with pytest.raises(ConfigError, match="cannot be loaded as a critic"):
        load_critic(str(tmp_path), device=CPU)
    with pytest.raises(ConfigError, match="has 0 linear heads with one output"):
        ValueScorer(model)
