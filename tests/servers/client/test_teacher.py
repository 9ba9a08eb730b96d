"""A teacher's log-probs are those of its own model at the tokens that were sampled."""

from __future__ import annotations
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import numpy as np
import orjson
import pytest
from transformers import PreTrainedTokenizerFast
from areal_lite.config.trainer_config import TeacherConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.teacher import Teacher
from areal_lite.servers.dialects import Dialect
from areal_lite.servers.dialects.dialect import BadResponse
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from tests.embedded.serving import load, logprobs_of, worst
from tests.trainer.training_data import drawn_batch, sequence

FIXTURES = Path(__file__).parents[2] / "fixtures"
RECORDED: list[tuple[Dialect, str]] = [
    (SGLang(), "wire_sglang/generate_max_new_tokens_0"),
    (VLLM(), "wire_vllm/generate_prompt_logprobs"),
]
IDS = [504, 3575, 282, 4649, 314]


@pytest.mark.parametrize(("dialect", "name"), RECORDED)
def test_real_servers_score_the_tokens_that_were_sent(dialect: Dialect, name: str) -> None:
    recorded: Any = orjson.loads((FIXTURES / f"{name}.json").read_bytes())
    asked, sent = recorded["request"]["body"], dialect.score_body(IDS, 0)
    assert recorded["request"]["path"] == dialect.generate_path
    assert sent.keys() <= asked.keys() and sent["sampling_params"].keys() <= asked["sampling_params"].keys()
    scores = dialect.parse_scores(recorded["response"]["body"], IDS, 0)
    assert scores == pytest.approx([-11.65, -0.32, -2.4, -0.448], abs=0.08)
    for wrong in (IDS[:-1], [*IDS[:-1], 7], [*IDS, 7]):
        with pytest.raises(BadResponse, match="log-probs"):
            dialect.parse_scores(recorded["response"]["body"], wrong, 0)


@pytest.mark.parametrize("dialect", [SGLang(), VLLM()])
def test_a_reply_without_scores_is_refused(dialect: Dialect) -> None:
    for reply in ({}, {"meta_info": {}, "prompt_logprobs": [None, {}]}, {"prompt_logprobs": None}):
        with pytest.raises(BadResponse, match="without the log-probs of the prompt"):
            dialect.parse_scores(reply, [1, 2], 0)
    overflowing = {"meta_info": {"input_token_logprobs": [[None, 1], [-1e39, 2]]}}
    overflowing["prompt_logprobs"] = [None, {"2": {"logprob": -1e39}}]  # type: ignore[assignment]
    with pytest.raises(BadResponse, match="finite"):
        dialect.parse_scores(overflowing, [1, 2], 0)


@pytest.fixture(scope="module")
def address(tiny_model: Path) -> Iterator[str]:
    """Serve the model; those of the shared server change."""
    with EmbeddedServer(model_path=str(tiny_model), dtype="float32", num_threads=1, device="cpu") as server:
        yield server.address.removeprefix("http://")


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_every_token_gets_the_teachers_logprob_also_beside_a_server_that_is_away(
    tiny_model: Path, address: str
) -> None:
    teacher = Teacher(TeacherConfig(addresses=[address]), tokenizer_path=str(tiny_model), patience_s=5.0)
    teacher._servers.insert(0, Server(f"http://{closed_address()}", 1))
    long = sequence([5 + place % 90 for place in range(200)], [199])
    sequences, model = [*drawn_batch(3), long], load(tiny_model)
    teacher.score(sequences)
    for each in sequences:
        scores, ids = each.reference_logprobs, each.input_ids.tolist()
        first = each.loss_mask.tolist().index(True)
        assert scores is not None and scores.dtype == np.float32 and not scores[:first].any()
        assert worst(scores[first:].tolist(), logprobs_of(model, ids[:first], ids[first:])) < 1e-4


def test_a_teacher_that_stays_away_ends_the_run_with_its_address(tiny_model: Path, address: str) -> None:
    away = closed_address()
    with pytest.raises(ServerError, match=f"the teacher http://{away} .* start it before the run"):
        Teacher(TeacherConfig(addresses=[away]), tokenizer_path=str(tiny_model), patience_s=0.2)
    teacher = Teacher(TeacherConfig(addresses=[address]), tokenizer_path=str(tiny_model), patience_s=0.2)
    teacher._servers[0].url = f"http://{away}"
    with pytest.raises(ServerError, match=f"no teacher answered for 0.2 s; the last, http://{away}"):
        teacher.score(drawn_batch(3))


def test_a_teacher_with_another_tokenizer_is_refused(tiny_model: Path, address: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(other)
    assert json.loads((other / "tokenizer.json").read_text()) != tokens
    with pytest.raises(ConfigError, match="has another tokenizer than .*: 1 tokens differ"):
        Teacher(TeacherConfig(addresses=[address]), tokenizer_path=str(other), patience_s=1.0)
    given = TeacherConfig(addresses=[address], tokenizer_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="tokenizer of the teacher .* set trainer.kl.teacher.tokenizer_path"):
        Teacher(given, tokenizer_path=str(tiny_model), patience_s=1.0)
