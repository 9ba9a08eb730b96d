"""The page's API: what it answers, whom it refuses, and what its answers forbid a browser."""

from __future__ import annotations
import asyncio
import base64
import fcntl
import json
import queue
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
import pytest
from aiohttp.test_utils import TestClient, TestServer
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.view import page_server as server
from areal_lite.tools.view.page_data import Answers
from areal_lite.tools.view.page_server import CSP, REQUESTS, page_app
from areal_lite.tools.view.single_file import static_files
from tests.tools.inspect.dump_lines import failed, line, turn, write
from tests.tools.view.page_runs import EVIL, write_evil_run, write_run

T = TypeVar("T")
Client = TestClient[Any, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "exp" / "t"
    fork = [turn("prompt", "2+2?"), turn("assistant", "no", turn_idx=2, parent_idx=0, loss_mask=[1, 0])]
    first = [turn("prompt", "2+2?"), turn("assistant", "It is 4", turn_idx=1, parent_idx=0)]
    lines = (line(7, 0, turns=first), line(7, 1, member_idx=0, turns=fork), line(7, 2, reward=1.0))
    write(root / "rollout/3/7.jsonl", *lines)
    write(root / "rollout/4/8.jsonl", failed(8, 0), line(8, 1, status="rejected", error="stale: 3 versions old"))
    metrics = [{"step": n, "time": 100.0 + n, "train/reward_mean": n / 4, "timing/step_s": 1.0} for n in (1, 2, 3)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    return root


def with_client(paths: list[Path], ask: Callable[[Client], Awaitable[T]], filter: str = "") -> T:
    async def main() -> T:
        with Dumps.open(*paths, may_be_empty=True) as dumps:
            async with TestClient(TestServer(page_app(Answers(dumps, filter)))) as client:
                return await ask(client)

    return asyncio.run(main())


def answers(paths: list[Path], *asked: tuple[str, dict[str, Any]], status: int = 200) -> list[Any]:
    async def ask(client: Client) -> list[Any]:
        found = []
        for name, parameters in asked:
            response = await client.get(f"/api/{name}", params=parameters)
            assert response.status == status, await response.text()
            assert response.headers["Content-Security-Policy"] == CSP
            found.append(await response.json())
        return found

    return with_client(paths, ask)


def test_pages_of_episodes_are_filtered_sorted_and_counted(run: Path) -> None:
    asked = ({"filter": "status=accepted", "sort": "-reward", "limit": 2}, {"offset": 4}, {"count": 0, "limit": 1})
    best, last, first = answers([run], *(("episodes", each) for each in asked))
    assert ([row["id"] for row in best["rows"]], best["total"]) == (["rollout/3/7.jsonl:3", "rollout/3/7.jsonl:1"], 3)
    assert ([row["task"] for row in last["rows"]], last["total"]) == (["7"], 5)
    assert first["rows"][0]["group"] == "8"  # the newest version


def test_a_row_has_the_ends_of_its_prompt_and_of_its_last_answer(run: Path) -> None:
    turns = [
        turn("prompt", "x" * 700 + "?"),
        turn("assistant", "first"),
        turn("environment", "42"),
        turn("assistant", "last"),
    ]
    write(run / "rollout/9/9.jsonl", line(9, turns=turns), line(9, 1, turns=[turn("prompt", None)]))
    (found,) = answers([run], ("episodes", {"filter": "version=9"}))
    texts = [(each["prompt"], each["answer"]) for each in found["rows"]]
    assert texts == [("x" * 599 + "?", "last"), ("", None)]


def test_a_run_is_written_while_it_holds_the_lock_of_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REFRESH_S", 0.02)
    (run / ".lock").write_text("")

    async def ask(client: Client) -> list[bool]:
        async def writes() -> bool:
            return bool((await (await client.get("/api/state")).json())["runs"][0]["writes"])

        stream = await client.get("/api/changes")
        seen = [await writes()]
        with (run / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert await stream.content.readline()
            for _ in range(2):
                await stream.content.readline()  # begun
            seen.append(await writes())
        for _ in range(2):
            await stream.content.readline()  # ended
        return [*seen, await writes()]

    assert with_client([run], ask) == [False, True, False]


@pytest.mark.parametrize(
    ("name", "parameters", "error"),
    [
        ("episodes", {"filter": "rewrd<1"}, "no key 'rewrd'; did you mean 'reward'?"),
        ("episodes", {"sort": "color"}, "cannot sort by 'color'"),
        ("episodes", {"offset": "-1"}, "offset is '-1'"),
        ("episodes", {"limit": "501"}, "limit of 1..500"),
        ("summary", {"filter": "("}, "filter, at"),
        ("timeline", {"filter": "status=lost"}, "status is one of"),
        ("episode", {"run": "exp/t", "id": "rollout/3/9.jsonl:1"}, "has no episode"),
        ("episode", {"run": "exp/t"}, "the request needs id="),
        ("episode", {"run": "other", "id": "rollout/3/7.jsonl:1"}, "no run 'other' is open"),
        ("episode", {"run": "exp/t", "id": "../../../etc/passwd:1"}, "has no episode"),
        ("texts", {"run": "other", "id": "rollout/3/7.jsonl:1"}, "no run 'other' is open"),
        ("group", {"run": "exp/t", "group": "99"}, "has no group '99'"),
        ("compare", {"first": "exp/t", "second": "x"}, "no run 'x' is open"),
    ],
)
def test_what_cannot_be_answered_is_an_error_with_a_hint(
    run: Path, name: str, parameters: dict[str, str], error: str
) -> None:
    (found,) = answers([run], (name, parameters), status=400)
    assert found.keys() == {"error", "hint"}
    assert error in found["error"] and found["hint"]


def test_an_episode_has_each_turn_once_and_its_sequences_as_paths(run: Path) -> None:
    (found,) = answers([run], ("episode", {"run": "exp/t", "id": "rollout/3/7.jsonl:1"}))
    assert sorted(found["turns"]) == ["0", "1", "2"]
    assert [found["turns"][key]["parent"] for key in "012"] == [None, "0", "0"]
    assert [[each["turn"] for each in s["path"]] for s in found["sequences"]] == [["0", "1"], ["0", "2"]]
    assert found["turns"]["1"]["columns"] == {"mask": [1, 1], "logprob": [-0.5, -0.5], "version": [3, 3]}
    assert found["facts"]["task_id"] == "7" and "turns" not in found["facts"]
    assert [each["key"] for each in found["quantities"]] == ["mask", "logprob", "version"]


def test_an_episode_has_the_pictures_of_its_images(tmp_path: Path) -> None:
    png = b"\x89PNG any"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{'a' * 64}.png").write_bytes(png)
    spans = [{"offset": 0, "length": 1, "sha256": name * 64, "grid": [1, 2, 2]} for name in "ab"]
    spans[1]["offset"] = 1
    evil = [{**spans[0], "sha256": "../images/" + "a" * 64}]
    turns = [turn("prompt", images=spans), turn("assistant", turn_idx=1, parent_idx=0, images=evil)]
    write(tmp_path / "rollout/3/7.jsonl", line(7, 0, turns=turns))
    (found,) = answers([tmp_path], ("episode", {"run": _name(tmp_path), "id": "rollout/3/7.jsonl:1"}))
    shown = [each["picture"] for each in found["turns"]["0"]["images"]]
    assert shown == [f"data:image/png;base64,{base64.b64encode(png).decode()}", None]
    assert found["turns"]["1"]["images"] == []


def test_turns_that_sequences_share_keep_the_mask_of_each(tmp_path: Path) -> None:
    shared = [turn("prompt"), turn("assistant", turn_idx=1, parent_idx=0)]
    masked = [turn("prompt"), turn("assistant", turn_idx=1, parent_idx=0, loss_mask=[0, 0])]
    write(tmp_path / "rollout/3/7.jsonl", line(7, 0, turns=shared), line(7, 1, member_idx=0, turns=masked))
    (found,) = answers([tmp_path], ("episode", {"run": _name(tmp_path), "id": "rollout/3/7.jsonl:2"}))
    assert found["turns"]["1"]["columns"]["mask"] == [1, 1]
    assert [s["path"][1]["columns"] for s in found["sequences"]] == [{}, {"mask": [0, 0]}]


def test_schema_1_has_no_turn_indices_and_each_sequence_is_a_chain(tmp_path: Path) -> None:
    turns = [{"role": "prompt", "ids": [1]}, {"role": "assistant", "ids": [2]}]
    write(tmp_path / "rollout/3/7.jsonl", {**line(7, 0), "schema": 1, "turns": turns})
    (found,) = answers([tmp_path], ("episode", {"run": _name(tmp_path), "id": "rollout/3/7.jsonl:1"}))
    keys = [each["turn"] for each in found["sequences"][0]["path"]]
    assert [found["turns"][key]["parent"] for key in keys] == [None, keys[0]]


def test_columns_that_training_adds_can_be_chosen_and_the_difference_is_computed(tmp_path: Path) -> None:
    facts = {"advantages": [0.5, -0.5], "entropy": [1.0, 2.0], "proximal_logprobs": [-0.25, None], "gain": [1, 2]}
    write(tmp_path / "rollout/3/7.jsonl", line(7, 0, turns=[turn("assistant", **facts), turn("prompt", odd=[1])]))
    (found,) = answers([tmp_path], ("episode", {"run": _name(tmp_path), "id": "rollout/3/7.jsonl:1"}))
    kinds = {each["key"]: each["kind"] for each in found["quantities"]}
    assert kinds == {
        **{"mask": "flag", "logprob": "surprise", "version": "category", "advantage": "signed", "entropy": "heat"},
        **{"difference": "signed", "gain": "heat", "proximal_logprobs": "surprise"},
    }
    assert found["turns"]["0"]["columns"]["difference"] == [0.25, None]


def test_versions_that_were_not_recorded_are_not_shown(tmp_path: Path) -> None:
    turns = [turn("assistant", versions=[-1, 3]), turn("assistant", turn_idx=1, versions=[-1, -1])]
    write(tmp_path / "rollout/3/7.jsonl", line(7, 0, turns=turns))
    (found,) = answers([tmp_path], ("episode", {"run": _name(tmp_path), "id": "rollout/3/7.jsonl:1"}))
    assert [found["turns"][key]["columns"].get("version") for key in "01"] == [[None, 3], [None, None]]
    assert "version" in [each["key"] for each in found["quantities"]]
    write(tmp_path / "rollout/3/8.jsonl", line(8, 0, turns=turns[1:]))
    (found,) = answers([tmp_path], ("episode", {"run": _name(tmp_path), "id": "rollout/3/8.jsonl:1"}))
    assert "version" not in [each["key"] for each in found["quantities"]]


def test_texts_of_tokens_come_from_the_runs_tokenizer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("texts", {"run": "exp/t", "id": "rollout/3/7.jsonl:1"})
    assert answers([run], asked)[0]["texts"] is None
    monkeypatch.setattr("areal_lite.tools.view.page_data.decoder", lambda root: lambda id: f"<{id}>")
    assert answers([run], asked)[0] == {"texts": {"0": "<0>", "1": "<1>"}, "reason": None}


def test_a_group_has_its_members_with_their_answers_and_why_they_do_not_train(run: Path) -> None:
    (found,) = answers([run], ("group", {"run": "exp/t", "group": "8"}))
    broken, stale = found["members"]
    assert (broken["status"], broken["cause"]) == ("failed", "TimeoutError: too slow")
    assert broken["error"].startswith("Traceback")
    assert (stale["cause"], stale["answer"]) == ("stale: 3 versions old", [{"role": "assistant", "text": "It is 4"}])


def test_summary_has_failures_by_cause_and_unreadable_lines(run: Path) -> None:
    write(run / "rollout/5/9.jsonl", line(9), tail="[]\n")
    (found,) = answers([run], ("summary", {}))
    assert [(each["error_type"], each["count"]) for each in found["runs"][0]["failures"]] == [
        (None, 1),
        ("TimeoutError", 1),
    ]
    assert [each["kind"] for each in found["problems"]] == ["wrong shape"]


def test_curves_are_those_of_metrics_jsonl_also_if_its_last_line_is_torn(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/re')
    found, extra = answers([run], ("metrics", {}), ("metrics", {"extra": "time"}))
    assert found["runs"]["exp/t"]["train/reward_mean"] == [[1, 0.25], [2, 0.5], [3, 0.75]]
    assert [panel["title"] for panel in found["panels"]] == ["Reward", "Seconds of a step"]
    assert extra["panels"][-1]["title"] == "time"


def test_every_curve_is_in_one_panel(run: Path) -> None:
    names = ("reward_mean", "loss", "entropy", "kl", "grad_norm", "clip_fraction", "staleness_mean")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **{f"train/{name}": 1.0 for name in names}}) + "\n")
    (found,) = answers([run], ("metrics", {}))
    assert sorted(
        name for panel in found["panels"] for name in panel["curves"] if name in found["runs"]["exp/t"]
    ) == sorted(f"train/{name}" for name in names)
    assert len({panel["title"] for panel in found["panels"]}) == len(found["panels"])


def test_long_curves_are_thinned_out(run: Path) -> None:
    lines = [{"step": n, "train/reward_mean": 0.0} for n in range(5000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (found,) = answers([run], ("metrics", {}))
    assert 1000 < len(found["runs"]["exp/t"]["train/reward_mean"]) <= 2000


def test_a_diagnosis_has_the_findings_of_each_run_and_its_rewards(run: Path) -> None:
    (answer,) = answers([run], ("diagnosis", {"filter": "version=3"}))
    (found,) = answer["runs"]
    assert found["run"] == _name(run) and {"zero_reward", "truncated"} <= {each["name"] for each in found["findings"]}
    assert found["episodes"] == [[3, 3, 0.5], [3, 2, 1.0]]  # version, trained tokens of all lines, reward


def test_the_timeline_has_the_calls_of_each_episode_once(run: Path) -> None:
    turns = [
        turn("assistant", started=99.0, latency_s=0.5, agent="main", server="http://a:1"),
        turn("environment", "42"),
    ]
    turns += [turn("assistant", started=101.0, latency_s=0.5)]
    write(run / "rollout/5/9.jsonl", line(9, 0, turns=turns), line(9, 1, member_idx=0, turns=turns))
    (found,) = answers([run], ("timeline", {"filter": "version=5"}))
    (episode,) = found["episodes"]
    assert episode["calls"] == [[99.0, 0.5, "http://a:1", None], [101.0, 0.5, None, "42"]]
    assert (episode["start"], episode["end"]) == (98.5, 100.0)
    assert [each["step"] for each in found["steps"]] == [1, 2, 3]


def test_rows_of_two_runs_are_compared_by_their_prompts(tmp_path: Path) -> None:
    for name, rewards in (("a", (0.0, 1.0)), ("b", (1.0, 1.0))):
        for task, reward in enumerate(rewards):
            turns = [turn("prompt", f"row {task}", ids=[task, 1]), turn("assistant")]
            other = task + 10 * (name == "b")  # another order of rows
            write(tmp_path / f"x/{name}/rollout/1/{other}.jsonl", line(other, 0, reward=reward, turns=turns))
    alone = [turn("prompt", "only here", ids=[9])]
    write(tmp_path / "x/b/rollout/1/30.jsonl", line(30, 0, turns=alone))
    (found,) = answers([tmp_path], ("compare", {"first": "x/a", "second": "x/b"}))
    pairs = [(each["prompt"], each["change"], [s["tasks"] for s in each["sides"]]) for each in found["pairs"]]
    assert pairs == [("row 0", 1.0, [["0"], ["10"]]), ("row 1", 0.0, [["1"], ["11"]])]
    assert (found["both"], found["only"]) == (2, [0, 1])


def test_new_dumps_and_metrics_are_told_to_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REFRESH_S", 0.02)

    async def ask(client: Client) -> tuple[list[bytes], int]:
        stream = await client.get("/api/changes")
        seen = [await stream.content.readline() for _ in range(2)]
        with monkeypatch.context() as patch:
            looks: queue.SimpleQueue[None] = queue.SimpleQueue()

            def full(dumps: Dumps) -> int:
                looks.put(None)
                raise OSError("the disk is full")

            patch.setattr(Dumps, "refresh", full)
            for _ in range(2):
                await asyncio.to_thread(looks.get, timeout=10)
        write(run / "rollout/9/99.jsonl", line(99))
        seen += [await stream.content.readline() for _ in range(2)]
        (run / "metrics.jsonl").write_text("{}\n")
        seen += [await stream.content.readline() for _ in range(2)]
        return seen[::2], (await (await client.get("/api/episodes")).json())["total"]

    assert with_client([run], ask) == ([b"data: 0\n", b"data: 1\n", b"data: 2\n"], 6)


def test_a_run_that_has_just_begun_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    found, curves = answers([tmp_path], ("episodes", {}), ("metrics", {}))
    assert (found, curves["panels"]) == ({"rows": [], "total": 0}, [])


def test_a_run_that_writes_while_it_is_read_loses_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "r", versions=2, groups=2)

    async def ask(client: Client) -> int:
        total = (await (await client.get("/api/episodes")).json())["total"]
        for task in range(100, 120):
            write(tmp_path / f"r/rollout/9/{task}.jsonl", line(task))
            assert (await client.get("/api/summary")).status == 200
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            now = (await (await client.get("/api/episodes")).json())["total"]
            if now == total + 20:
                return 20
            await asyncio.sleep(0.05)
        return int(now - total)

    assert with_client([tmp_path], ask) == 20


ORIGIN = "http://127.0.0.1:{port}"
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({}, "/api/state", 200),
        ({"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}, "/api/state", 200),
        ({"Host": "localhost:{port}"}, "/", 200),
        (LINK, "/", 200),
        (
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
            "/api/state",
            403,
        ),
        (LINK | {"Sec-Fetch-Dest": "iframe"}, "/", 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, "/static/app.js", 403),
        ({"Sec-Fetch-Site": "same-site"}, "/api/state", 403),
        ({"Origin": "http://evil.example"}, "/api/state", 403),
        ({"Origin": "http://127.0.0.1:1"}, "/api/state", 403),
        ({"Origin": "null"}, "/api/state", 403),
        ({"Host": "evil.example:{port}"}, "/", 403),
        ({"Host": ""}, "/", 403),
        ({}, "/static/../server.py", 404),
        ({}, "/static/%2e%2e%2fserver.py", 404),
        ({}, "/api/secrets", 404),
    ],
)
def test_only_programs_and_the_page_itself_are_served(
    run: Path, headers: dict[str, str], path: str, status: int
) -> None:
    async def ask(client: Client) -> tuple[int, Any]:
        port = client.server.port
        given = {name: value.replace("{port}", str(port)) for name, value in headers.items()}
        response = await client.get(path, headers=given)
        for name, value in server.HEADERS.items():
            assert response.headers[name] == value
        if response.status != 200:
            assert (await response.json()).keys() == {"error", "hint"}
        return response.status, response.headers["Content-Type"]

    assert with_client([run], ask)[0] == status


def test_nothing_but_reading_is_served(run: Path) -> None:
    async def ask(client: Client) -> set[int]:
        return {(await client.request(method, "/api/episodes")).status for method in ("POST", "PUT", "DELETE", "PATCH")}

    assert with_client([run], ask) == {405}


def test_the_policy_allows_the_pages_own_files_and_nothing_else() -> None:
    rules = dict(rule.split(" ", 1) for rule in CSP.split("; "))
    assert rules == {
        **{"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'"},
        **{"img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"},
    }


def test_files_of_the_page_have_their_types(run: Path) -> None:
    async def ask(client: Client) -> dict[str, str]:
        names = {name: await client.get(f"/static/{name}") for name in static_files()}
        return {name: response.headers["Content-Type"] for name, response in names.items()}

    types = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    found = with_client([run], ask)
    assert {"index.html", "page.css", "app.js"} <= found.keys()
    assert found == {name: f"{types[name.rpartition('.')[2]]}; charset=utf-8" for name in found}


def test_evil_texts_come_out_as_they_went_in(tmp_path: Path) -> None:
    root = write_evil_run(tmp_path / "e" / "evil")
    for place, text in enumerate(EVIL):
        episode, group = answers(
            [root],
            ("episode", {"run": "e/evil", "id": f"rollout/{place}/{place}.jsonl:2"}),
            ("group", {"run": "e/evil", "group": text}),
        )
        assert episode["turns"]["3"]["text"] == text
        assert episode["facts"]["error_type"] == text
        assert len(group["members"]) == 2


@pytest.fixture
def busy() -> Iterator[int]:
    with server._listen(0) as listener:
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_an_error_and_the_usual_one_falls_back(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(server.ConfigError, match=f"port {busy} of 127.0.0.1: .* use another --port"):
        server._listen(busy)
    monkeypatch.setattr(server, "PORT", busy)
    with server._listen(None) as listener:
        assert listener.getsockname()[1] != busy


def test_the_command_prints_its_address_and_ends_at_once_with_a_page_open(run: Path) -> None:
    command = [sys.executable, "-m", "areal_lite", "view", run, "--no-browser", "--filter", "reward<0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address = process.stdout.readline().split()[0]
            assert address.endswith("/#episodes?filter=reward%3C0.5")
            with urllib.request.urlopen(address.partition("#")[0] + "api/changes") as stream:
                assert stream.readline() == b"data: 0\n"
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 130
            # Nothing where the command ends before the thread that says it has run.
            assert process.stderr.read() in ("", "stopping; signal again to stop at once\n")
        finally:
            process.kill()


def test_every_address_of_the_api_is_described() -> None:
    text = (Path(__file__).parents[3] / "docs/view.md").read_text()
    assert all(f"`/api/{name}" in text for name in (*REQUESTS, "changes"))


def _name(path: Path) -> str:
    return "/".join(path.parts[-2:])
