"""What a user may name as a workflow, and what each wrong name is told."""

from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from areal_lite.api import RolloutWorkflow
from areal_lite.config.dotted_path import load_object
from areal_lite.config.rollout_config import AgentsConfig, InferenceEngineConfig
from areal_lite.errors import ConfigError
from areal_lite.rollout.episodes.workflow_resolution import resolve_workflow
from tests.agents.scripted_engine import tokenizer


class Workflow(RolloutWorkflow):
    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


class Unfinished(RolloutWorkflow):
    pass


class Agent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class SyncAgent:
    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class NarrowAgent:
    async def run(self, data: dict[str, Any]) -> float:
        return 1.0


class Nothing:
    pass


def function(data: dict[str, Any]) -> float:
    return 1.0


instance = Workflow(3.0)


class Wrapped(Workflow):
    def __init__(self, agent: Any, config: InferenceEngineConfig) -> None:
        super().__init__()
        self.agent = agent


def resolve(workflow: Any, **kwargs: Any) -> RolloutWorkflow:
    config = InferenceEngineConfig(agents=AgentsConfig(workflow=f"{__name__}.Wrapped"))
    return resolve_workflow(workflow, kwargs or None, config)


def test_every_documented_form_resolves() -> None:
    here = __name__
    assert resolve(instance) is instance
    assert resolve(f"{here}.instance") is load_object(f"{here}.instance", where="test")
    assert isinstance(resolve(Workflow), Workflow)
    kept = resolve(f"{here}.Workflow", reward=2.0)
    assert isinstance(kept, RolloutWorkflow) and kept.reward == 2.0  # type: ignore[attr-defined]
    assert isinstance(resolve(f"{here}:Workflow"), RolloutWorkflow)
    for agent in (Agent, Agent(), f"{here}.Agent"):
        wrapped = resolve(agent)
        assert isinstance(wrapped, Wrapped) and type(wrapped.agent).__name__ == "Agent"


@pytest.mark.parametrize(
    ("workflow", "kwargs", "says"),
    [
        (None, {}, "workflow is None: give a RolloutWorkflow instance"),
        ("nodots", {}, "write a dotted path 'package.module.Name'"),
        ("../etc/passwd", {}, "write a dotted path"),
        ("no_such_module.Name", {}, "there is no module 'no_such_module'"),
        (f"{__name__}.Workfow", {}, "did you mean"),
        (f"{__name__}.Nothing", {}, "is not a workflow: give a RolloutWorkflow"),
        (f"{__name__}.function", {}, "is a function"),
        ("areal_lite.api", {}, "is a module: name the class in it"),
        (SyncAgent, {}, ", or set rollout.agents.isolation: thread"),
        (NarrowAgent, {}, "cannot take api_key, base_url, http_client"),
        (Unfinished, {}, "does not define arun_episode: write `async def arun_episode"),
        (Workflow, {"rewrd": 2.0}, "did you mean 'reward'?"),
        (Agent, {"x": 1}, "do not fit its constructor"),
        (instance, {"reward": 2.0}, "already an instance, so workflow_kwargs ['reward'] have nowhere to go"),
        (3, {}, "is not a workflow"),
    ],
)
def test_every_wrong_form_says_what_to_write_instead(workflow: Any, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match="workflow") as caught:
        resolve(workflow, **kwargs)
    assert says in str(caught.value)


def test_a_module_that_needs_a_missing_package_names_the_package(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "needs_missing.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs 'not_installed_anywhere', which is not installed"):
        resolve("needs_missing.Agent")


@given(st.text(max_size=30))
def test_no_text_is_imported_unless_it_is_a_dotted_path(text: str) -> None:
    with pytest.raises(ConfigError):
        load_object("zz_no_such_package." + text, where="workflow")
    with pytest.raises(ConfigError):
        load_object(text.replace(".", ""), where="workflow")


class WithTokenizer(Workflow):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer


class WithTokenizerOrPath(WithTokenizer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase | str) -> None:
        super().__init__(tokenizer)


class WithPath(WithTokenizer):
    def __init__(self, tokenizer: str | None = None) -> None:
        super().__init__(tokenizer)


class WithAnyOptions(WithTokenizer):
    def __init__(self, **options: Any) -> None:
        super().__init__(options["tokenizer"])


@pytest.mark.parametrize(
    ("workflow", "loads"),
    [(WithTokenizer, True), (WithTokenizerOrPath, True), (WithPath, False), (WithAnyOptions, False)],
)
def test_a_tokenizers_path_is_loaded_unless_the_class_wants_the_path(
    workflow: type[WithTokenizer], loads: bool, tmp_path: Path
) -> None:
    path = str(tmp_path)
    tokenizer().save_pretrained(path)
    given: Any = resolve(workflow, tokenizer=path)
    if not loads:
        assert given.tokenizer == path
        return
    assert given.tokenizer.eos_token == "<|im_end|>"
    for again in (path, given.tokenizer):
        assert resolve(workflow, tokenizer=again).tokenizer is given.tokenizer  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no tokenizer can be loaded from 'no/such/folder'"):
        resolve(workflow, tokenizer="no/such/folder")
