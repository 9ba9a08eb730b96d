"""`serve CONFIG --train`: a program outside takes sessions, calls the model and sends rewards."""

from __future__ import annotations
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
import pytest
import yaml
from areal_lite.cli.commands import parse
from areal_lite.cli.main import main
from areal_lite.errors import ConfigError
from areal_lite.processes.ports import free_ports
from areal_lite.tools.serve import serve
from tests.e2e.test_training_run import dumped, records

APP = """
import json, os, sys, threading, time
from openai import APIError, APIStatusError, OpenAI
out = open(sys.argv[2], "w")
desk = OpenAI(base_url=sys.argv[1], api_key=os.environ["AREAL_LITE_KEY"], timeout=None)

def end(client, body):
    try:
        return client.post("/rl/end_session", cast_to=object, body=body)
    except APIStatusError as error:
        return error.status_code

def play():
    while True:
        try:
            session = desk.post("/rl/start_session", cast_to=object, body={})
        except APIError:  # the run has not begun, or has ended
            time.sleep(0.1)
            continue
        client = OpenAI(base_url=session["base_url"], api_key=session["api_key"])
        messages = [{"role": "user", "content": session["row"]["question"]}]
        answer = client.chat.completions.create(model="default", messages=messages).choices[0].message.content
        reward = sum(each.islower() for each in answer or "") / 8
        own = desk.with_options(api_key=session["api_key"])
        line = {"task": session["task_id"], "member": session["member_idx"], "reward": reward}
        print(json.dumps(line), file=out, flush=True)
        replies = [end(own, body) for body in ({"score": 1}, {"reward": reward}, {"reward": reward}, {"reward": 0})]
        replies.append(end(desk, {"reward": reward}))
        print(json.dumps({"replies": replies}), file=out, flush=True)  # the run may have ended

for _ in range(4):
    threading.Thread(target=play).start()
"""


def test_sessions_of_a_program_outside_are_dumped_and_trained(
    served_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,), seen = free_ports("127.0.0.1", 1), tmp_path / "seen.jsonl"
    config: dict[str, Any] = yaml.safe_load(served_yaml.read_text())
    config |= {"workflow": None, "workflow_kwargs": {"port": port}, "eval_dataset": None}
    config["rollout"] |= {"group_size": 2, "consumer_batch_size": 2}
    config["trainer"]["total_steps"] = 2
    served_yaml.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("AREAL_LITE_KEY", "the app's own key")
    app = subprocess.Popen([sys.executable, "-c", APP, f"http://127.0.0.1:{port}", str(seen)])
    try:
        assert main(["serve", str(served_yaml), "--train"]) == 0
    finally:
        app.kill()
        app.wait()
    (run_dir,) = (tmp_path / "runs").glob("*/*")
    assert [record["step"] for record in records(run_dir) if "train/loss" in record] == [1, 2]
    sent = [json.loads(line) for line in seen.read_text().splitlines()]
    rewards = {(each["task"], each["member"]): each["reward"] for each in sent if "task" in each}
    accepted = [line for line in dumped(run_dir, "rollout") if line["status"] == "accepted"]
    assert len(accepted) == 8
    for line in accepted:
        assert rewards[line["task_id"], line["member_idx"]] == line["reward"]
        assert sum(map(sum, (turn["loss_mask"] for turn in line["turns"]))) > 0
    replies = [each["replies"] for each in sent if "replies" in each]
    assert len(replies) >= 4 and all(each == [400, {}, 410, 410, 410] for each in replies)


def test_a_run_that_cannot_offer_sessions_is_refused(served_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load(served_yaml.read_text())
    config["rollout"]["workers"] = 2
    served_yaml.write_text(yaml.safe_dump(config))
    monkeypatch.delenv("AREAL_LITE_KEY", raising=False)
    with pytest.raises(ConfigError, match="AREAL_LITE_KEY is not set"):
        serve.train_outside(options_of("serve", str(served_yaml), "--train"), {})
    monkeypatch.setenv("AREAL_LITE_KEY", "k")
    with pytest.raises(ConfigError, match="sessions need rollout.workers: 1"):
        serve.train_outside(options_of("serve", str(served_yaml), "--train"), {})
    with pytest.raises(ConfigError, match="--replicas goes into the section server"):
        serve.train_outside(options_of("serve", str(served_yaml), "--train"), {"replicas": "2"})
    for option in (
        "--deterministic",
        "--log-dir=x",
        "--launch=ray",
        "--ray-address=h:1",
        "--gpus-per-node=1",
        "--seed=3",
    ):
        with pytest.raises(ConfigError, match=f"^{option.partition('=')[0]} is not used with --train: write it into"):
            serve.train_outside(options_of("serve", str(served_yaml), "--train", option), {})


def options_of(*arguments: str) -> Any:
    return parse(list(arguments))
