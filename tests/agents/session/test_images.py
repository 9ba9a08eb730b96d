"""Images in the requests of agents: three APIs, prompts as spans, branches, limits."""

from __future__ import annotations
import asyncio
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.data.vision.image_encoder import ImageEncoder, image_encoder
from areal_lite.data.vision.image_store import ImageStore
from tests.agents.scripted_engine import ScriptedEngine, create
from tests.fixtures.tiny_vlm import CHAT_TEMPLATE, IMAGE_ID, build_tiny_processor

RED, BLUE = (200, 10, 20), (10, 20, 200)


def picture(color: tuple[int, int, int] = RED, size: tuple[int, int] = (24, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def url(color: tuple[int, int, int] = RED, size: tuple[int, int] = (24, 16)) -> str:
    return "data:image/png;base64," + base64.b64encode(picture(color, size)).decode()


def image(color: tuple[int, int, int] = RED, size: tuple[int, int] = (24, 16)) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(color, size)}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm")
    processor = build_tiny_processor()
    processor.image_processor.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    return folder


Open = Callable[..., tuple[ChatSession, ScriptedEngine, ImageStore]]


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Open:
    def make(answers: Any = lambda request: "ok", **options: Any) -> tuple[ChatSession, ScriptedEngine, ImageStore]:
        engine = ScriptedEngine(answers)
        engine.tokenizer = build_tiny_processor().tokenizer
        engine.tokenizer.chat_template = CHAT_TEMPLATE
        encoder = image_encoder(str(folder), engine.tokenizer, tmp_path)
        assert isinstance(encoder, ImageEncoder)
        renderer = ChatRenderer(engine.tokenizer, images=encoder, **options)
        return ChatSession(engine, renderer, GenerationHyperparameters()), engine, encoder.store  # type: ignore[arg-type]

    return make


def ask(session: ChatSession, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return [await create(session, body) for body in bodies]

    return asyncio.run(run())


def pictures(request: ModelRequest, store: ImageStore) -> list[tuple[int, tuple[int, int, int]]]:
    """Return length and colour of the images of a request, whose placeholders are all in spans."""
    inside = {place for span in request.images for place in range(span.offset, span.end)}
    assert inside == {place for place, token in enumerate(request.input_ids) if token == IMAGE_ID}
    found = []
    for span in request.images:
        with Image.open(store.path(span.sha256)) as opened:
            assert span.grid == (1, opened.height // 4, opened.width // 4)
            found.append((span.length, opened.getpixel((0, 0))))
    return found  # type: ignore[return-value]


def test_a_prompt_has_all_tokens_of_its_images_as_the_models_own_processor_writes_them(opened: Open) -> None:
    session, engine, store = opened()
    ask(session, {"messages": [user("one ", image(), " or ", image(BLUE, (16, 8)), "?")]})
    (request,) = engine.requests
    assert pictures(request, store) == [(6, RED), (2, BLUE)]
    processor = build_tiny_processor()
    text = "<|im_start|>user\none <|vision_start|><|image_pad|><|vision_end|> or "
    text += "<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
    images = [Image.open(io.BytesIO(picture(*which))) for which in ((RED,), (BLUE, (16, 8)))]
    assert request.input_ids == processor(text=[text], images=images)["input_ids"][0]
    assert IMAGE_ID in (request.gconfig.stop_token_ids or ())


def test_a_conversation_grows_by_images_and_stays_one_sequence(opened: Open) -> None:
    session, engine, store = opened()
    first = [user("a", image())]
    messages = [*first, {"role": "assistant", "content": "ok"}, user(image(BLUE), "b")]
    tool = {"role": "tool", "tool_call_id": "x", "content": [image(), {"type": "text", "text": "screen"}]}
    ask(session, {"messages": first}, {"messages": messages})
    ask(session, {"messages": [*messages, {"role": "assistant", "content": "ok"}, tool]})
    assert [pictures(request, store) for request in engine.requests] == [
        [(6, RED)],
        [(6, RED), (6, BLUE)],
        [(6, RED), (6, BLUE), (6, RED)],
    ]
    assert (session.clean_turns, session.forks) == (3, 0)
    assert len(list(store.folder.iterdir())) == 2
    sequences = session.history.export("concat")
    for one in sequences.values():
        one.reward = 1.0
    trajectory = trajectory_of(dict(sequences), [answer.model_response for answer in session.interactions.values()])
    (sequence,) = trajectory.sequences
    assert sequence.images == engine.requests[-1].images
    prompts = [turn for turn in trajectory.turns if turn.images]
    assert [[span.offset for span in turn.images] for turn in prompts] == [
        [turn.ids.tolist().index(IMAGE_ID)] for turn in prompts
    ]
    assert len(prompts) == 3


def test_two_pictures_with_equal_ids_are_two_branches(opened: Open) -> None:
    session, engine, store = opened()
    for color in (RED, BLUE, RED):
        ask(session, {"messages": [user("what?", image(color)), {"role": "assistant", "content": "x"}, user("and?")]})
        ask(session, {"messages": [user("what?", image(color))]})
    assert len({tuple(request.input_ids) for request in engine.requests}) == 2
    trajectory = trajectory_of(None, [answer.model_response for answer in session.interactions.values()])
    roots = [turn for turn in trajectory.turns if turn.parent is None]
    assert len(roots) == 4  # two texts, each with two pictures
    assert len({(turn.ids.tobytes(), turn.images) for turn in roots}) == 4


def test_a_continued_answer_is_that_of_the_same_picture(opened: Open) -> None:
    session, engine, store = opened(iter(["red one", "blue one", "z"]))
    for color in (RED, BLUE):
        ask(session, {"messages": [user("what?", image(color))]})
    said = {"role": "assistant", "content": "blue one"}
    ask(session, {"messages": [user("what?", image(BLUE)), said, user("sure?")]})
    assert (session.forks, pictures(engine.requests[-1], store)) == (0, [(6, BLUE)])
    ask_other = {"messages": [user("what?", image(RED)), said, user("sure?")]}
    engine._answers = lambda request: "k"
    ask(session, ask_other)
    assert (session.forks, pictures(engine.requests[-1], store)) == (1, [(6, RED)])


def test_an_image_is_decoded_once_and_no_pixels_stay_in_memory(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session, engine, store = opened()
    decoded: list[bytes] = []
    monkeypatch.setattr(ImageEncoder, "stored", _counted(ImageEncoder.stored, decoded))
    messages: list[Any] = [user(image())]
    for _ in range(3):
        ask(session, {"messages": messages})
        messages += [{"role": "assistant", "content": "ok"}, user("go on")]
    assert len(decoded) == 1
    kept = repr([(one.raw, one.body, one.messages, one.keys) for one in session.history._conversations])
    assert url()[30:60] not in kept + repr(vars(session.images))


def _counted(plain: Any, calls: list[Any]) -> Any:
    def counted(self: ImageEncoder, source: bytes) -> Any:
        calls.append(source)
        return plain(self, source)

    return counted


@pytest.mark.parametrize("tools_in_system_prompt", [False, True])
def test_anthropic_and_responses_have_images_too(opened: Open, tools_in_system_prompt: bool) -> None:
    session, engine, store = opened(tools_in_system_prompt=tools_in_system_prompt)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture()).decode()}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "see"}, block]}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    anthropic = {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [block, {"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, result]},
        ],
    }
    inputs: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_image", "image_url": url()}, {"type": "input_text", "text": "a"}]},
        {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": url(BLUE)}]},
    ]

    async def run() -> list[Any]:
        service = AgentService()
        headers = {"x-api-key": service.open(session)}
        sent = [
            ("/v1/messages", anthropic),
            ("/v1/messages/count_tokens", anthropic),
            ("/v1/responses", {"input": inputs}),
        ]
        bodies = [(path, json.dumps(body).encode()) for path, body in sent]
        replies = [await service.handle("POST", path, headers, body) for path, body in bodies]
        previous = {"input": "more", "previous_response_id": json.loads(replies[2].body)["id"]}  # type: ignore[arg-type]
        later = await service.handle("POST", "/v1/responses", headers, json.dumps(previous).encode())
        assert later.status == 200, later
        stored = f"/v1/responses/{json.loads(replies[2].body)['id']}/input_items"  # type: ignore[arg-type]
        replies.append(await service.handle("GET", stored, headers, b""))
        assert [reply.status for reply in replies] == [200] * 4, replies
        return [json.loads(reply.body) for reply in replies]  # type: ignore[arg-type]

    _, counted, _, items = asyncio.run(run())
    two = [(6, RED), (6, BLUE)]
    assert [pictures(request, store) for request in engine.requests] == [[(6, RED)] * 3, two, two]
    assert counted["input_tokens"] == len(engine.requests[0].input_ids)
    assert sum("input_image" in json.dumps(item) for item in items["data"]) == 2


def refusal(session: ChatSession, body: dict[str, Any]) -> tuple[int, str | None, str]:
    with pytest.raises(RequestError) as raised:
        ask(session, body)
    return raised.value.status, raised.value.param, raised.value.message


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, "is an image at 'http://127.0.0.1"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "is an image at 'file:///etc/passwd'"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "send its bytes, data:image/png;base64,"),
        ({"type": "image_url"}, "is an image at None"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "no data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "cannot be read"),
        (image(size=(5000, 4000)), "5000 x 4000 pixels: send at most 16,000,000"),
    ],
)
def test_a_part_that_is_no_image_is_a_400_that_names_it(opened: Open, part: Any, problem: str) -> None:
    session, engine, store = opened()
    status, param, message = refusal(session, {"messages": [user("a"), user("see", part)]})
    assert (status, param) == (400, "messages[1].content[1]")
    assert message.startswith("messages[1].content[1]")
    assert problem in message
    assert not store.folder.exists()
    assert not engine.requests
    assert session.error is None


PIECES = st.recursive(
    st.none() | st.integers() | st.sampled_from(["", "x", url(), url()[:60], "data:image/png;base64,", "file:///etc/passwd"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "image_url", "url", "text", "source", "data", "media_type"]), inner)
    | st.fixed_dictionaries({"type": st.sampled_from(["image_url", "image", "input_image", "tool_result", "text"])})
    | st.builds(lambda value: {"type": "image_url", "image_url": value}, inner)
    | st.builds(lambda value: {"type": "image", "source": {"type": "base64", "data": value}}, inner)
    | st.builds(lambda value: {"type": "input_image", "image_url": value}, inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(PIECES, min_size=1, max_size=3), role=st.sampled_from(["user", "tool", "assistant", "system"]))
def test_no_body_is_a_fault_of_the_server(opened: Open, contents: list[Any], role: str) -> None:
    session, _, _ = opened()
    messages = [{"role": role, "content": content} for content in contents]

    async def run() -> None:
        service = AgentService()
        headers = {"x-api-key": service.open(session)}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            body = {"messages": messages, "max_tokens": 3} if path != "/v1/responses" else {"input": messages}
            reply = await service.handle("POST", path, headers, json.dumps(body).encode())
            assert reply.status in (200, 400), reply

    asyncio.run(run())
    assert session.error is None


def test_a_system_message_may_have_an_image(opened: Open) -> None:
    session, engine, store = opened()
    for color in (RED, BLUE):
        ask(session, {"messages": [user("look at ", image(color)) | {"role": "system"}, user("a")]})
    assert [pictures(request, store)[0][1] for request in engine.requests] == [RED, BLUE]
    assert len({request.metadata["agent"] for request in engine.requests} - {"main"}) == 1  # two prompts, two agents


def test_a_request_has_at_most_16_images(opened: Open) -> None:
    session, engine, _ = opened()
    ask(session, {"messages": [user(*[image()] * 15)]})
    sent = [user(*[image()] * 15), {"role": "assistant", "content": "ok"}, user(image()), user(image())]
    status, param, message = refusal(session, {"messages": sent})
    assert (status, param) == (400, "messages[3]")
    assert "over 16 images" in message
    ask(session, {"messages": sent[:-1]})
    assert len(engine.requests[-1].images) == 16


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user("what is <|image_pad|>?")]},
        {"messages": [user("a"), {"role": "assistant", "content": "<|image_pad|>"}, user("b")]},
        {"messages": [user("<|image_pad|>", image())]},
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": "a <|vision_start|> b"}, user("b")]},
        {"messages": [user("a")], "tools": [{"type": "function", "function": {"name": "f<|image_pad|>"}}]},
    ],
)  # fmt: skip
def test_a_text_that_spells_a_placeholder_is_refused(opened: Open, body: dict[str, Any]) -> None:
    session, engine, _ = opened(tools_in_system_prompt=True)
    status, _, message = refusal(session, body)
    assert status == 400
    assert "which stands for an image: leave it out" in message


def test_no_json_is_an_image_that_is_stored_already(opened: Open) -> None:
    session, _, _ = opened()
    forged = {"type": "image", "digest": "0" * 64, "sha256": "0" * 64}
    assert "has a part of type 'image': only text is supported" in refusal(session, {"messages": [user(forged)]})[2]


def test_a_template_that_leaves_an_image_out_is_refused(opened: Open) -> None:
    session, engine, _ = opened()
    engine.tokenizer.chat_template = CHAT_TEMPLATE.replace("'image' in part", "false").replace(
        "'image' or", "'none' or"
    )
    assert "writes 0 placeholders '<|image_pad|>' for 1 images" in refusal(session, {"messages": [user(image())]})[2]


def test_a_template_of_parts_alone_gets_parts(opened: Open) -> None:
    session, engine, store = opened()
    parts_only = CHAT_TEMPLATE.replace("{% if message['content'] is string %}{{ message['content'] }}{% else %}", "")
    engine.tokenizer.chat_template = parts_only.replace("{% endif %}{% endfor %}{% endif %}", "{% endif %}{% endfor %}")
    session = ChatSession(engine, ChatRenderer(engine.tokenizer, images=session.renderer.images), session.gconfig)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "ok"}, user(image())]
    ask(session, {"messages": messages[:1]}, {"messages": messages})
    assert engine.tokenizer.decode(engine.requests[0].input_ids).startswith("<|im_start|>user\nsay<|im_end|>")
    assert pictures(engine.requests[1], store) == [(6, RED)]
    assert session.forks == 0


def test_a_placeholder_that_is_sampled_ends_the_answer_and_is_text(opened: Open) -> None:
    answers = iter([[70, IMAGE_ID], "ok"])
    session, engine, _ = opened(answers)
    ask(session, {"messages": [user("a")]})
    (first,) = session.interactions.values()
    assert first.model_response.stop_reason == "stop"
    said = {"role": "assistant", "content": first.output_message_list[0]["content"]}
    ask(session, {"messages": [user("a"), said, user("b", image())]})
    request = engine.requests[-1]
    assert IMAGE_ID in request.input_ids[: request.images[0].offset]
    assert [span.length for span in request.images] == [6]
    assert session.forks == 0
