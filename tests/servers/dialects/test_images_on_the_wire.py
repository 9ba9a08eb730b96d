"""How images go to SGLang, vLLM and the embedded server, and which replies to them are believed."""

from __future__ import annotations
import asyncio
import base64
from collections.abc import Callable
from typing import Any
import orjson
import pytest
from areal_lite.api import ModelRequest
from areal_lite.api.image_span import ImageSpan, images_of
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.dialects.dialect import BadResponse, ControlCall, GenerationCall
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM
from tests.fixtures.engines import MakeEngine, generation_call
from tests.stub_server import StubThread

RED, BLUE = "a" * 64, "b" * 64
IDS = [1, 9, 9, 9, 2, 9, 9, 3, 9, 9, 9]
IMAGES = (ImageSpan(1, 3, RED, (1, 2, 6)), ImageSpan(5, 2, BLUE, (1, 2, 4)), ImageSpan(8, 3, RED, (1, 2, 6)))
URLS = [f"data:image/png;base64,{data}" for data in ("cmVk", "Ymx1ZQ==", "cmVk")]


def call(**fields: Any) -> GenerationCall:
    pngs = {RED: "cmVk", BLUE: "Ymx1ZQ=="}
    return generation_call(**{"input_ids": IDS, "images": IMAGES, "pngs": pngs} | fields)


def test_the_embedded_server_gets_ids_spans_and_each_png_once() -> None:
    body = SGLang(embedded=True).generate_body(call())
    assert body["input_ids"] == IDS
    assert images_of(orjson.loads(orjson.dumps(body["images"]))) == IMAGES
    assert body["image_files"] == {RED: "cmVk", BLUE: "Ymx1ZQ=="}
    assert SGLang(embedded=True).images_call(call()) is None


def test_sglang_gets_a_placeholder_and_the_data_of_each_image() -> None:
    body = SGLang().generate_body(call(input_ids=[*IDS, 7], num_continued=1))
    assert body["input_ids"] == [1, 9, 2, 9, 3, 9, 7]
    assert body["image_data"] == URLS
    assert not {"images", "image_files"} & body.keys()


def test_sglang_is_not_sent_a_placeholder_that_the_model_sampled() -> None:
    with pytest.raises(ConfigError, match="placeholder token 9 outside of its images"):
        SGLang().generate_body(call(input_ids=[*IDS, 9]))


def rendered(lengths: list[int], starts: list[int], hashes: int = 3, **more: Any) -> dict[str, Any]:
    places = [{"offset": start, "length": length} for start, length in zip(starts, lengths, strict=True)]
    features = {
        "mm_hashes": {"image": [f"h{n}" for n in range(hashes)]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": ["k"] * 3},
    }
    return {"token_ids": [0] * 40, "features": features | more}


def test_vllm_gets_our_ids_and_its_own_features_at_our_places() -> None:
    vllm = VLLM()
    content = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
    messages = {"messages": [{"role": "user", "content": content}]}
    assert vllm.images_call(call()) == ControlCall("/v1/chat/completions/render", messages)
    assert vllm.images_call(generation_call()) is None
    body = vllm.with_features(vllm.generate_body(call()), call(), rendered([3, 2, 3], [4, 12, 20]))
    assert body["token_ids"] == IDS
    places = [{"offset": 1, "length": 3}, {"offset": 5, "length": 2}, {"offset": 8, "length": 3}]
    assert body["features"]["mm_placeholders"] == {"image": places}
    assert (body["features"]["mm_hashes"]["image"], body["features"]["kwargs_data"]["image"]) == (
        ["h0", "h1", "h2"],
        ["k"] * 3,
    )
    cached = rendered([3, 2, 3], [4, 12, 20], kwargs_data=None)
    assert vllm.with_features({}, call(), cached)["features"]["kwargs_data"] is None


@pytest.mark.parametrize(
    "reply",
    [
        rendered([3, 2], [4, 12]),
        rendered([3, 3, 3], [4, 12, 20]),
        rendered([3, 2, 3], [20, 12, 4]),
        rendered([3, 2, 3], [4, 12, 20], hashes=2),
        rendered([3, 2, 3], [4, 12, 20], kwargs_data={"image": ["k"]}),
        {"features": None},
        [],
    ],
)
def test_features_of_other_images_are_refused(reply: Any) -> None:
    with pytest.raises(BadResponse, match="images of|without features"):
        VLLM().with_features({}, call(), reply)


def test_a_server_that_reads_other_tokens_than_were_sent_fails_the_call(
    start_stub: Callable[..., StubThread], start_engine: MakeEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, request_retries=1)
    store = ImageStore.of_run(engine.config.run_dir)
    red, blue = store.put(b"red"), store.put(b"blue")
    images = tuple(span._replace(sha256={RED: red, BLUE: blue}[span.sha256]) for span in IMAGES)
    with pytest.raises(ServerError, match="an answer to 6 prompt tokens instead of 11"):  # it does not expand them
        generate(engine, ModelRequest(input_ids=IDS, images=images))
    (body, *_) = stub.server.requests
    assert [base64.b64decode(url.partition(",")[2]) for url in body["image_data"]] == [b"red", b"blue", b"red"]
    lost = (images[0]._replace(sha256="c" * 64),)
    with pytest.raises(ConfigError, match="cannot be read"):
        generate(engine, ModelRequest(input_ids=IDS, images=lost))
    with pytest.raises(ValueError, match="spans must be sorted"):
        generate(engine, ModelRequest(input_ids=IDS[:6], images=images[:2]))


def generate(engine: Any, request: ModelRequest) -> Any:

    return asyncio.run(engine.agenerate(request))
