"""The probe of ``areal-lite doctor`` says which way a server takes images, and whether it sees them as the trainer."""

from __future__ import annotations
import base64
import io
from pathlib import Path
from typing import Any
import orjson
import pytest
import yaml
from aiohttp import web
from PIL import Image
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RunConfig
from areal_lite.data.vision.image_processor import load_image_processor
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.rl_run import make_trainer
from areal_lite.tools.doctor import doctor_run
from tests.fixtures.tiny_vlm import save_tiny_vlm
from tests.stub_server import StubServer, StubThread
from tests.tools.doctor.test_doctor import examine, the_line


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a run with pictures."""
    folder = tmp_path_factory.mktemp("run")
    device = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
    values: dict[str, Any] = {
        "experiment_name": "checked",
        "fileroot": str(folder / "runs"),
        "model_path": str(save_tiny_vlm(folder / "model")),
        "workflow": "examples.squares.SquaresAgent",
        "train_dataset": {"path": "examples.squares.questions", "kwargs": {"size": 8}},
        "rollout": {"group_size": 2, "consumer_batch_size": 1, "gconfig": {"max_new_tokens": 8}},
        "server": device,
        "trainer": {"total_steps": 9, "learning_rate": 1e-3, **device},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def trainer(path: Path) -> Any:
    return make_trainer(load_config(path, root=RunConfig), lambda *_: None)


def finding(path: Path, trainer: Any, server: Any, backend: str) -> str:
    """Return what is found of a server."""
    with StubThread(server) as stub:
        given = [f"rollout.addresses=[{stub.address}]", f"rollout.backend={backend}"]
        config = load_config(path, given, root=RunConfig)
        with RemoteInfEngine(config.rollout) as engine:
            (found,) = doctor_run.images(config, engine, trainer)
    return str(found)


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("0.5.12", "SGLang 0.5.12 expands in a text that it tokenizes again; its log-probs"),
        ("0.5.13", "SGLang 0.5.13 expands among our ids; its log-probs"),
        ("0.5.23.post1", "SGLang 0.5.23.post1 expands among our ids; its log-probs"),
        (None, "SGLang of an unknown version expands in a text that it tokenizes again; its log-probs"),
    ],
)
def test_the_wire_of_sglang_goes_by_its_version(path: Path, trainer: Any, release: str | None, says: str) -> None:
    stub = StubServer()
    stub.image_tokens = 12
    stub.told["version"] = release
    found = finding(path, trainer, stub, "sglang")
    assert f"takes images as one placeholder each, which {says}" in found
    assert ("sampled tokens may become others: use 0.5.13" in found) == ("again" in says)
    assert "that is more than the 0.001 of rounding" in found  # a stub's log-probs are made up
    assert len(stub.requests[-1]["image_data"]) == 1


def test_a_server_that_does_not_expand_images_is_a_warning(path: Path, trainer: Any) -> None:
    found = finding(path, trainer, StubServer(), "sglang")
    assert found.startswith("warning")
    assert "sent an answer to " in found


class VLLMStub:
    """vLLM's two routes, in its documented form."""

    def __init__(self, model: str, *, renders: bool) -> None:
        self._processor, self._renders = load_image_processor(model), renders
        self.generated: list[Any] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_post("/inference/v1/generate", self.generate)
        if self._renders:
            app.router.add_post("/v1/chat/completions/render", self.render)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def render(self, request: web.Request) -> web.Response:
        ((message,), at, places) = (await request.json())["messages"], 4, []
        for part in message["content"]:
            png = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            with Image.open(io.BytesIO(png)) as image:
                length = self._processor.num_tokens(self._processor.grid(image.height, image.width))
            places.append({"offset": at, "length": length})
            at += length + 2
        hashes = [f"h{index}" for index in range(len(places))]
        features = {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}
        return web.json_response({"token_ids": [0] * at, "features": features})

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.generated.append(body)
        count = body["sampling_params"]["max_tokens"]
        content = [{"token_id": 7, "logprob": -0.5}] * count
        choice = {"token_ids": [7] * count, "finish_reason": "length", "logprobs": {"content": content}}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}})


def test_vllm_is_asked_for_features_through_its_render_route(path: Path, trainer: Any) -> None:
    model = load_config(path, root=RunConfig).model_path
    stub = VLLMStub(model, renders=True)
    found = finding(path, trainer, stub, "vllm")
    assert "takes images as ids, and features of its route /v1/chat/completions/render; its log-probs" in found
    (place,) = stub.generated[-1]["features"]["mm_placeholders"]["image"]
    assert stub.generated[-1]["token_ids"][place["offset"] - 1 : place["offset"] + 2] == [3, 5, 5]


def test_a_vllm_without_the_render_route_is_a_warning(path: Path, trainer: Any) -> None:
    found = finding(path, trainer, VLLMStub(load_config(path, root=RunConfig).model_path, renders=False), "vllm")
    assert "said HTTP 404" in found


def test_a_run_with_pictures_is_tried_on_the_embedded_server(path: Path) -> None:
    code, lines = examine(path)
    assert code == 0, lines
    line = the_line(lines, "ok", "takes images as ids, spans and PNG files")
    assert line.endswith("its log-probs and those of the trainer differ by 0.0000 nats on average")
    the_line(lines, "ok", "training step: loss")
