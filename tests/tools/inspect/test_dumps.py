"""Dumps are read through an index that follows the files, whatever state the files are in."""

from __future__ import annotations
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pyarrow
import pytest
from pyarrow import parquet
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect import dump_index, index_update
from areal_lite.tools.inspect.dumps import Dumps, _runs_at
from tests.tools.inspect.dump_lines import failed, line, schema_1, turn, write


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three groups of training and one of evaluation."""
    root = tmp_path / "exp" / "t"
    write(root / "rollout/3/7.jsonl", line(7, 0), line(7, 1, reward=1.0, seqlen=9))
    write(root / "rollout/3/8.jsonl", failed(8, 0), schema_1(8, 1, reward=0.0))
    write(root / "rollout/10/12.jsonl", line(12, 0, reward=None))
    write(root / "eval-rollout/3/9.jsonl", line(9, 0))
    write(root / "metrics.jsonl", {"step": 1})
    return root


@pytest.fixture
def dumps(run: Path) -> Iterator[Dumps]:
    with Dumps.open(run) as dumps:
        yield dumps


def ids(dumps: Dumps, filter: str = "", sort: str = "version") -> list[str]:
    return [row["id"] for row in dumps.rows(filter, sort=sort)]


def kinds(dumps: Dumps) -> list[tuple[str, int, str]]:
    return [(problem["file"], problem["line"], problem["kind"]) for problem in dumps.problems()]


def index_of(run: Path) -> Path:
    """Return the file of a run's index, which is up to date and closed."""
    with Dumps.open(run) as dumps:
        assert dumps.count() == 6
        return Path(dumps.summary()[0]["index"])


def test_rewards_of_answers_are_averaged_as_those_of_their_episodes(tmp_path: Path) -> None:
    first = [line(20, n, member_idx=0, reward=-1.0, episode_reward=-4.0) for n in range(4)]
    branch = line(20, 4, member_idx=0, reward=None, status="untrained")
    write(tmp_path / "r/rollout/3/20.jsonl", *first, branch, line(20, 5, member_idx=1, reward=-1.0))
    write(tmp_path / "r/rollout/4/21.jsonl", line(21, 0, reward=2.0))
    with Dumps.open(tmp_path / "r") as dumps:
        group = dumps.groups()[0]
        assert (group["lines"], group["episodes"], group["reward"], group["reward_min"]) == (6, 2, -2.5, -4.0)
        (summary,) = dumps.summary()
        assert [(each["reward"], each["rewards"]) for each in summary["versions"]] == [(-2.5, 2), (2.0, 1)]
        assert summary["reward"] == -1.0
        assert (len(ids(dumps, "reward<-3")), len(ids(dumps, "sequence_reward=-1"))) == (4, 5)


def test_old_dumps_without_an_episode_reward_are_averaged_by_episode(tmp_path: Path) -> None:
    rewards = [(0, 0.0), (0, 0.0), (0, 1.5), (1, 1.0)]
    lines = [line(20, n, member_idx=member, reward=reward) for n, (member, reward) in enumerate(rewards)]
    write(tmp_path / "r/rollout/3/20.jsonl", *lines)
    with Dumps.open(tmp_path / "r") as dumps:
        assert dumps.groups()[0]["reward"] == 0.75


def test_rows_come_by_version_task_and_sample_with_what_filters_use(dumps: Dumps) -> None:
    assert ids(dumps) == [
        "rollout/3/7.jsonl:1",
        "rollout/3/7.jsonl:2",
        "rollout/3/8.jsonl:1",
        "rollout/3/8.jsonl:2",
        "eval-rollout/3/9.jsonl:1",
        "rollout/10/12.jsonl:1",
    ]
    row = dumps.page("status=failed").rows[0]
    expected = {
        **{"run": "exp/t", "scope": "rollout", "version": 3, "task": 8, "group": "8", "member": 0, "sample": 0},
        **{"status": "failed", "error_kind": "agent", "error_type": "TimeoutError", "cause": "TimeoutError: too slow"},
        **{"reward": None, "tokens": 4, "trained": 2, "turns": 2, "calls": 1, "stop": ["stop"], "agent": []},
    }
    assert expected.items() <= row.items()


def test_every_line_of_a_group_has_the_data_source_of_its_row(tmp_path: Path) -> None:
    groups = [
        [line(n, 0, row=row), line(n, 1)] for n, row in enumerate([{"data_source": "a:b"}, {"data_source": 3}, None])
    ]
    write(tmp_path / "r/rollout/0/0.jsonl", *groups[0], *groups[1])
    write(tmp_path / "r/rollout/0/2.jsonl", *groups[2], line(2, 2, row={"data_source": "c"}))
    with Dumps.open(tmp_path / "r") as dumps:
        assert ids(dumps, "source=a:b") == ["rollout/0/0.jsonl:1", "rollout/0/0.jsonl:2"]
        assert ids(dumps, "data_source=none") == [f"rollout/0/{place}" for place in ("0.jsonl:3", "0.jsonl:4")] + [
            f"rollout/0/2.jsonl:{number}" for number in (1, 2)
        ]
        assert ids(dumps, "source~^c") == ["rollout/0/2.jsonl:3"]


def test_pages_are_parts_of_all_rows_with_their_total(dumps: Dumps) -> None:
    assert [len(dumps.page("", offset=at, limit=4).rows) for at in (0, 4, 8)] == [4, 2, 0]
    assert [dumps.page("", offset=at, limit=4).total for at in (0, 4, 8)] == [6, 6, 6]
    assert dumps.page("reward>=0.5", limit=1).total == 3
    assert dumps.page("reward>9").total == 0


def test_rows_sort_by_a_key_with_missing_values_last(dumps: Dumps) -> None:
    assert [row["reward"] for row in dumps.rows(sort="reward")] == [0.0, 0.5, 0.5, 1.0, None, None]
    assert [row["reward"] for row in dumps.rows(sort="-reward")] == [1.0, 0.5, 0.5, 0.0, None, None]
    assert ids(dumps, sort="-tokens")[0] == ids(dumps, sort="-seqlen")[0] == "rollout/3/7.jsonl:2"
    assert ids(dumps, 'text~"It is" tokens>3', sort="-tokens")[0] == "rollout/3/7.jsonl:2"
    with pytest.raises(ConfigError, match="cannot sort by 'status'; use one of reward, "):
        ids(dumps, sort="status")


def test_the_newest_training_comes_first_and_evaluation_last(run: Path, dumps: Dumps) -> None:
    newest = [
        f"rollout/{name}" for name in ("10/12.jsonl:1", "3/8.jsonl:1", "3/8.jsonl:2", "3/7.jsonl:1", "3/7.jsonl:2")
    ]
    assert ids(dumps, sort="newest") == [*newest, "eval-rollout/3/9.jsonl:1"]
    assert ids(dumps, "text~4 scope=eval-rollout", sort="newest") == ["eval-rollout/3/9.jsonl:1"]
    pages = [[row["id"] for row in dumps.rows(sort="newest", offset=at, limit=2)] for at in (0, 2, 4)]
    assert sum(pages, []) == ids(dumps, sort="newest")


def test_counts_and_parts_of_the_reward_are_keys_by_their_names(run: Path, dumps: Dumps) -> None:
    parts = (
        {"counts": {"tool_calls": 2.0, "reward/format-ok": n / 2}, "reward_extra": {"acc": n, "why": "x"}}
        for n in (1, 2)
    )
    write(run / "rollout/11/13.jsonl", *(line(13, place, **each) for place, each in enumerate(parts)))
    dumps.refresh()
    assert ids(dumps, "reward/format-ok<0.75 counts/tool_calls=2 tool_calls>1") == ["rollout/11/13.jsonl:1"]
    assert ids(dumps, "reward/acc!=none", sort="-reward/acc") == ["rollout/11/13.jsonl:2", "rollout/11/13.jsonl:1"]
    assert ids(dumps, sort="-reward/acc")[:2] == ids(dumps, "reward/acc>0", sort="-reward/acc")
    assert next(dumps.rows("reward/acc=2"))["numbers"] == {
        "reward/acc": 2,
        "reward/format-ok": 1.0,
        "counts/tool_calls": 2.0,
    }
    for wrong in ("reward/a') --", "counts/", "other/acc"):
        with pytest.raises(ConfigError, match="cannot sort by"):
            ids(dumps, sort=wrong)


def test_an_episode_has_its_own_time_its_log_prob_and_its_repetition(run: Path, dumps: Dumps) -> None:
    calls = [
        turn("assistant", ids=[1, 2, 3, 4] * 2, started=10.0, latency_s=2.0),
        turn("environment"),
        turn("assistant"),
    ]
    calls[2] |= {"ids": [1, 2, 3, 4], "logprobs": [-1.0, None, -1.0, -1.0], "started": 15.0, "latency_s": 1.0}
    write(run / "rollout/11/13.jsonl", line(13, turns=calls))
    dumps.refresh()
    (row,) = dumps.rows("task=13")
    assert (row["took_s"], row["logprob"], row["repetition"]) == (6.0, -0.8, 1 / 6)
    assert row["run_s"] == 1.5  # the group's


def test_training_facts_are_means_of_the_lines_they_name(run: Path, dumps: Dumps) -> None:
    def facts(advantage: float) -> list[dict[str, object]]:
        columns = {
            "task_id": ["7", "7", "9"],
            "sample_idx": [1, None, 0],
            "advantages": [[advantage, None, 0.0], [9.0], [9.0]],
        }
        parquet.write_table(pyarrow.table(columns | {"clipped": [[-1, 0, None], [0], [0]]}), run / "training/4.parquet")
        dumps.refresh()
        return [row for row in dumps.rows("advantage!=none")]

    (run / "training").mkdir()
    (found,) = facts(1.0)
    assert found["id"] == "rollout/3/7.jsonl:2"  # neither a line without a name nor one of evaluation
    assert (found["trained_step"], found["advantage"], found["clipped"], found["entropy"]) == (4, 0.5, 0.5, None)
    (found,) = facts(2.0)  # the step was trained again after a resume
    assert found["advantage"] == 1.0
    before = dumps.summary("trained_step=4")
    columns = {"task_id": ["9"], "sample_idx": [0], "advantages": [[3.0]], "clipped": [[0]]}
    parquet.write_table(pyarrow.table(columns), run / "training/4.parquet")  # and again, with other groups
    dumps.refresh()
    assert [row["id"] for row in dumps.rows("trained_step=4")] != [found["id"]]
    assert before != dumps.summary("trained_step=4")
    (run / "training/5.parquet").write_bytes(b"torn")
    assert dumps.refresh() == 0 and dumps.notes() == []


def test_a_sorted_text_search_looks_at_the_rows_in_growing_parts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lite.tools.inspect.run_dumps._FIRST_SORTED", 2)
    write(run / "rollout/5/90.jsonl", *(line(90, place, reward=place % 7) for place in range(60)))
    with Dumps.open(run) as dumps:
        every = ids(dumps, "task=90", sort="-reward")
        assert ids(dumps, "task=90 text~is", sort="-reward") == every
        assert [row["id"] for row in dumps.rows("task=90 text~is", sort="-reward", limit=5, offset=20)] == every[20:25]


def test_a_record_is_the_dumped_line_and_an_episode_all_of_its_sequences(run: Path) -> None:
    first, second = line(20, 0, member_idx=5), line(20, 1, member_idx=5, reward=0.25)
    write(run / "rollout/3/20.jsonl", line(20, 2), first, second)
    with Dumps.open(run) as dumps:
        place = {"run": "exp/t", "scope": "rollout", "version": 3}
        assert dumps.record("exp/t", "rollout/3/20.jsonl:2") == first | place | {"id": "rollout/3/20.jsonl:2"}
        episode = dumps.episode("exp/t", "rollout/3/20.jsonl:3")
        assert [record["id"] for record in episode] == ["rollout/3/20.jsonl:2", "rollout/3/20.jsonl:3"]
        assert [row["member"] for row in dumps.group("exp/t", "20")] == [5, 5, 2]
        for wrong in ("rollout/3/20.jsonl:9", "rollout/3/99.jsonl:1"):
            with pytest.raises(ConfigError, match="run exp/t has no episode"):
                dumps.record("exp/t", wrong)
        with pytest.raises(ConfigError, match="ids are FILE:LINE"):
            dumps.record("exp/t", "20")
        with pytest.raises(ConfigError, match="no run 'other' is open; there are: exp/t"):
            dumps.record("other", "rollout/3/20.jsonl:2")


def test_a_dump_that_is_gone_or_was_replaced_is_an_error_and_not_another_episode(run: Path, dumps: Dumps) -> None:
    (run / "rollout/3/7.jsonl").write_text(json.dumps(line(1, error="x" * 999)) + "\n")
    with pytest.raises(ConfigError, match="has changed since it was indexed"):
        dumps.record("exp/t", "rollout/3/7.jsonl:2")
    (run / "rollout/3/7.jsonl").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        dumps.record("exp/t", "rollout/3/7.jsonl:1")


def test_groups_and_summary_count_what_matches(dumps: Dumps) -> None:
    groups = dumps.groups("scope=rollout")
    assert [(each["version"], each["group"], each["lines"], each["reward"]) for each in groups] == [
        (3, "7", 2, 0.75),
        (3, "8", 2, 0.0),
        (10, "12", 1, None),
    ]
    assert groups[1]["status"] == {"failed": 1, "accepted": 1}
    assert [each["group"] for each in dumps.groups(offset=2, limit=1)] == ["9"]
    (summary,) = dumps.summary()
    assert (summary["lines"], summary["groups"], summary["reward"]) == (6, 4, 0.5)
    assert summary["status"] == {"accepted": 5, "failed": 1}
    versions = [(each["scope"], each["version"], each["lines"], each["reward"]) for each in summary["versions"]]
    assert sorted(versions) == [("eval-rollout", 3, 1, 0.5), ("rollout", 3, 4, 0.5), ("rollout", 10, 1, None)]
    (failure,) = summary["failures"]
    assert (failure["error_kind"], failure["error_type"], failure["count"]) == ("agent", "TimeoutError", 1)
    assert failure["error"].startswith("Traceback") and failure["id"] == "rollout/3/8.jsonl:1"


def test_a_summary_follows_a_file_that_is_replaced_by_one_of_equal_length(run: Path, dumps: Dumps) -> None:
    path = run / "rollout/10/12.jsonl"
    for reward in (1.0, 2.0, 3.0):
        path.unlink()
        dumps.refresh()
        write(path, line(12, reward=reward))
        dumps.refresh()
        assert [each["reward"] for each in dumps.summary()[0]["versions"] if each["version"] == 10] == [reward]


def test_a_sample_is_the_same_for_a_seed_and_spreads_over_runs(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "exp" / "u")
    with Dumps.open(tmp_path) as dumps:
        drawn = [(row["run"], row["id"]) for row in dumps.sample(5, 3)]
        assert drawn == [(row["run"], row["id"]) for row in dumps.sample(5, 3)]
        assert len(set(drawn)) == 5
        assert len({tuple(row["id"] for row in dumps.sample(2, seed)) for seed in range(20)}) > 5
        assert len(dumps.sample(99, 0, "reward>0")) == 6


def test_several_runs_are_one_list_and_a_folder_of_a_run_a_part_of_it(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "exp" / "u")
    with Dumps.open(tmp_path) as dumps:
        assert list(dumps.runs) == ["exp/t", "exp/u"]
        assert [len(dumps.page("", offset=at, limit=4).rows) for at in (0, 4, 8, 12)] == [4, 4, 4, 0]
        assert [row["run"] for row in dumps.rows(offset=5, limit=2)] == ["exp/t", "exp/u"]
        assert [row["reward"] for row in dumps.rows("reward!=none", sort="-reward", limit=3)] == [1.0, 1.0, 0.5]
        assert dumps.count("run~/u$") == 6
    for part, count in (("rollout", 5), ("rollout/3", 4), ("rollout/3/8.jsonl", 2), ("eval-rollout", 1)):
        with Dumps.open(run / part) as dumps:
            assert dumps.count() == count
            assert list(dumps.runs) == [f"exp/t/{part}"]
    assert not (run / "rollout" / "index.sqlite").exists()


def test_new_files_and_lines_appear_and_deleted_ones_go(run: Path, dumps: Dumps) -> None:
    assert dumps.refresh() == 0
    write(run / "rollout/3/30.jsonl", line(30))
    write(run / "rollout/11/31.jsonl", line(31), line(31, 1))
    assert dumps.refresh() == 3
    with (run / "rollout/11/31.jsonl").open("a") as file:
        file.write(json.dumps(line(31, 2)) + "\n")
    assert dumps.refresh() == 1
    assert dumps.count("task=31") == 3
    (run / "rollout/11/31.jsonl").unlink()
    shutil.rmtree(run / "eval-rollout")
    dumps.refresh()
    assert (dumps.count("task=31"), dumps.count("scope=eval-rollout"), dumps.count()) == (0, 0, 6)


def test_a_file_that_was_written_anew_is_read_anew(run: Path, dumps: Dumps) -> None:
    path = run / "rollout/3/7.jsonl"
    path.write_text("".join(json.dumps(line(7, place, reward=2.0, error="longer")) + "\n" for place in range(5)))
    assert dumps.refresh() == 5
    assert [row["reward"] for row in dumps.rows("task=7")] == [2.0] * 5
    other = path.with_suffix(".new")
    other.write_text(json.dumps(line(7, 0, reward=3.0)) + "\n")
    other.rename(path)
    assert dumps.refresh() == 1
    assert [row["reward"] for row in dumps.rows("task=7")] == [3.0]


def test_an_index_from_another_process_is_used_and_brought_up_to_date(run: Path) -> None:
    code = f"from areal_lite.tools.inspect.dumps import Dumps; print(Dumps.open({str(run)!r}).count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "6\n"
    write(run / "rollout/3/40.jsonl", line(40))
    with Dumps.open(run) as dumps:
        assert dumps.count() == 7


def test_an_unfinished_last_line_is_noted_and_read_when_it_is_whole(run: Path) -> None:
    text = json.dumps(line(50, 1)) + "\n"
    path = write(run / "rollout/3/50.jsonl", line(50), tail=text[:70])
    with Dumps.open(run) as dumps:
        assert dumps.count("task=50") == 1
        assert kinds(dumps) == [("rollout/3/50.jsonl", 2, "unfinished line")]
        for end in (90, len(text) - 1):  # the newline of a whole line may be missing
            path.write_text(json.dumps(line(50)) + "\n" + text[:end])
            assert dumps.refresh() == int(end > 90)
        assert kinds(dumps) == []
        with path.open("a") as file:
            file.write("\n" + json.dumps(line(50, 2)) + "\n")
        dumps.refresh()
        assert [row["sample"] for row in dumps.rows("task=50")] == [0, 1, 2]
        assert dumps.record("exp/t", dumps.page("sample=2").rows[0]["id"])["sample_idx"] == 2


WRONG = [
    *([], 3, "text", None, {"task_id": 1}),
    *({"turns": turns} for turns in (3, None, [3], [{"loss_mask": ["a"]}], [{"loss_mask": 3}], [{"ids": 3}])),
    {"turns": [{"latency_s": "soon"}]},
    {"turns": [{"loss_mask": [2**63, 2**63]}]},
    {"turns": [{"loss_mask": [1e308, 1e308]}]},
    {"turns": [], "reward": "much"},
    {"turns": [], "reward": True},
    {"turns": [], "seqlen": 2**64},
    {"turns": [], "timings": 3},
    {"turns": [], "status": 3},
    {"turns": [], "task_id": [1]},
    {"turns": [], "processes": [3]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=json.dumps)
def test_a_line_of_another_shape_is_a_problem_and_the_others_are_read(run: Path, wrong: object) -> None:
    path = run / "rollout/3/60.jsonl"
    path.write_text("\n".join([json.dumps(line(60)), json.dumps(wrong), "", json.dumps(line(60, 1))]))
    with Dumps.open(run) as dumps:
        assert kinds(dumps) == [("rollout/3/60.jsonl", 2, "wrong shape")]
        assert [row["line"] for row in dumps.rows("task=60")] == [1, 4]
        assert dumps.summary()[0]["problems"] == {"wrong shape": 1}


@pytest.mark.parametrize("damage", [b"{\n", b"\xff\xfe\n", b'{"reward": NaN}\n', b'{"a": "\\ud800"}\n', b"\x00\x00\n"])
def test_a_damaged_line_is_a_problem_with_its_place(run: Path, damage: bytes) -> None:
    path = write(run / "rollout/3/60.jsonl", line(60))
    before = path.read_bytes()
    path.write_bytes(before + damage + before)
    with Dumps.open(run) as dumps:
        (problem,) = dumps.problems()
        assert (problem["kind"], problem["line"], problem["offset"]) == ("not JSON", 2, len(before))
        assert dumps.count("task=60") == 2


def test_what_cannot_be_read_and_what_a_killed_run_left_is_noted(run: Path) -> None:
    (run / "rollout/3/folder.jsonl").mkdir()
    (run / "rollout/3/.unfinished-12-0").write_text('{"tor')
    with Dumps.open(run) as dumps:
        assert kinds(dumps) == [("rollout/3/folder.jsonl", 1, "unreadable")]
        assert dumps.refresh() == 0
        assert len(dumps.problems()) == 1
        assert dumps.summary()[0]["unfinished"] == 1


def test_a_run_that_has_just_begun_may_be_opened_and_its_dumps_come_later(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with pytest.raises(ConfigError, match="no dumped episodes here"):
        Dumps.open(tmp_path)
    with Dumps.open(tmp_path, may_be_empty=True) as dumps:
        assert (dumps.page().rows, dumps.page().total, dumps.summary()[0]["lines"]) == ([], 0, 0)
        write(tmp_path / "rollout/0/0.jsonl", line(0))
        dumps.refresh()
        assert (dumps.count(), dumps.summary()[0]["lines"]) == (1, 1)


def test_an_index_that_cannot_be_updated_is_read_as_it_is_with_a_note(
    run: Path, dumps: Dumps, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = dumps.summary()[0]["index"]
    write(run / "rollout/3/30.jsonl", *(line(30, place, error=f"{place}" * 999) for place in range(99)))
    with sqlite3.connect(index, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as impatient:
            impatient.setattr(dump_index, "_BUSY_S", 0.01)
            with Dumps.open(run) as blocked:
                assert blocked.count() == 6
                assert "the index is not up to date" in blocked.notes()[0]
        other.execute("ROLLBACK")
    other.close()
    assert dumps.refresh() == 99


def test_names_that_are_not_utf8_are_noted(run: Path) -> None:
    (run / "rollout/3/7.jsonl").rename(run / "rollout/3" / os.fsdecode(b"\xff.jsonl"))
    with Dumps.open(run) as dumps:
        assert (dumps.count(), dumps.group("exp/t", "\ud800")) == (4, [])
        assert "1 names are not UTF-8" in dumps.notes()[0]
        with pytest.raises(ConfigError, match="ids are FILE:LINE"):
            dumps.record("exp/t", "rollout/3/\udcff.jsonl:1")


def test_odd_ids_are_kept(run: Path) -> None:
    write(run / "rollout/3/odd.jsonl", line(2**64 - 1, group_id="a, \"b\" \\ 'c'"), line("x\x00y"))
    with Dumps.open(run) as dumps:
        assert [row["task"] for row in dumps.group("exp/t", "a, \"b\" \\ 'c'")] == [str(2**64 - 1)]
        assert dumps.count(f"task={2**64 - 1}") == 1


def test_other_folders_and_files_of_dumps_are_read_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "b" / "dump.jsonl", line(1, tail_version=5), line(2, tail_version=None))
    write(tmp_path / "a" / "metrics.jsonl", {"step": 1})
    for place in (tmp_path / "a", path):
        with Dumps.open(place) as dumps:
            assert [row["version"] for row in dumps.rows()] == [3, 5]
            assert dumps.problems() == []
            assert dumps.record(*(dumps.page().rows[0][key] for key in ("run", "id")))["task_id"] == 2
    with path.open("a") as file:
        file.write(json.dumps(line(3)) + "\n")
    with Dumps.open(path) as dumps:
        assert dumps.count() == 3
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["a", "b", "dump.jsonl", "metrics.jsonl"]


def test_a_path_without_dumps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with rollout.dump_to_file a run writes them to RUN_DIR/rollout"):
        Dumps.open(tmp_path)
    write(tmp_path / "metrics.jsonl", {"step": 1})
    with pytest.raises(ConfigError, match="no dumped episodes here"):
        Dumps.open(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        Dumps.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to look like a file" * 30, b"", b"SQLite format 3\x00" * 99]
)
def test_a_damaged_index_is_built_again(run: Path, content: bytes) -> None:
    index_of(run).write_bytes(content)
    with Dumps.open(run) as dumps:
        assert dumps.count() == 6
        assert bool(content) == any("built again" in note for note in dumps.summary()[0]["notes"])


def test_an_index_of_another_version_is_built_again(run: Path) -> None:
    with sqlite3.connect(index_of(run)) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.execute("DROP TABLE problems")
    connection.close()
    with Dumps.open(run) as dumps:
        assert dumps.count() == 6


def test_the_index_is_in_the_cache_and_nothing_is_written_to_the_run(run: Path, cache: Path) -> None:
    before = sorted(run.rglob("*"))
    assert index_of(run).parent == cache / "areal-lite"
    assert sorted(run.rglob("*")) == before
    assert (cache / "areal-lite").stat().st_mode & 0o777 == 0o700


def test_processes_that_index_the_same_run_at_once_add_each_line_once(run: Path) -> None:
    for task in range(100, 300):
        write(run / "rollout/4" / f"{task}.jsonl", line(task), line(task, 1))
    code = f"from areal_lite.tools.inspect.dumps import Dumps; print(Dumps.open({str(run)!r}).count())"
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [each.communicate(timeout=60)[0] for each in running] == ["406\n"] * 3


def test_threads_read_while_the_index_grows(run: Path, dumps: Dumps) -> None:
    stop = threading.Event()

    def read() -> int:
        rounds = 0
        while not stop.is_set():
            rows = list(dumps.rows('text~"It is" not error~Time', sort="-tokens"))
            assert [row["tokens"] for row in rows] == sorted((row["tokens"] for row in rows), reverse=True)
            assert dumps.summary()[0]["lines"] >= 6
            rounds += 1
        return rounds

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        try:
            for task in range(100, 160):
                write(run / "rollout/4" / f"{task}.jsonl", line(task))
                dumps.refresh()
        finally:
            stop.set()
        assert all(reader.result() > 0 for reader in readers)
    assert dumps.count() == 66


def test_text_is_found_however_it_is_escaped(run: Path) -> None:
    record = line(70, turns=[turn("assistant", 'naïve "quote" / tab\t 漢')])
    write(run / "rollout/3/70.jsonl", record)
    (run / "rollout/3/71.jsonl").write_text(json.dumps(record | {"task_id": 71}, ensure_ascii=False) + "\n")
    with Dumps.open(run) as dumps:
        for pattern in ("naïve", "漢", r"\"quote", "quote", "/ t", r"na.*\t"):
            assert dumps.count(f'text~"{pattern}"') == 2, pattern
        assert dumps.count('text~"u00ef"') == 0


def test_a_large_file_is_read_in_chunks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_update, "_CHUNK_LINES", 10)
    write(run / "rollout/3/80.jsonl", *(line(80, place) for place in range(95)))
    with Dumps.open(run) as dumps:
        assert [row["sample"] for row in dumps.rows("task=80")] == list(range(95))
        with (run / "rollout/3/80.jsonl").open("a") as file:
            file.writelines(json.dumps(line(80, place)) + "\n" for place in range(95, 120))
        assert dumps.refresh() == 25
        assert [row["line"] for row in dumps.rows("task=80")] == list(range(1, 121))


def test_an_update_that_is_killed_is_continued(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_update, "_CHUNK_LINES", 1)
    for scope in ("rollout", "rollout/3", "rollout/10", "eval-rollout", "eval-rollout/3"):
        os.utime(run / scope, (1, 1))

    class KilledError(Exception):
        pass

    def kill(lines: int) -> None:
        if lines >= 2:
            raise KilledError

    with pytest.raises(KilledError):
        Dumps.open(run, on_progress=kill)
    with Dumps.open(run) as dumps:
        assert dumps.count() == 6


def test_a_run_that_begins_later_is_seen(tmp_path: Path) -> None:
    fileroot = tmp_path / "runs"
    fileroot.mkdir()
    with Dumps.open(fileroot, may_be_empty=True) as dumps:
        for name in ("b", "a"):
            write(fileroot / "exp" / name / "rollout/3/7.jsonl", line(7, 0))
            write(fileroot / "exp" / name / "metrics.jsonl", {"step": 1})
            dumps.refresh()
        assert list(dumps.runs) == ["exp/a", "exp/b"]
        assert [row["run"] for row in dumps.rows()] == ["exp/a", "exp/b"] and not dumps.problems()
        fileroot.rename(tmp_path / "elsewhere")
        dumps.refresh()
        assert list(dumps.runs) == ["exp/a", "exp/b"]


def test_runs_of_an_experiment_that_is_named_like_a_folder_of_dumps(tmp_path: Path) -> None:
    run = tmp_path / "rollout/t1"
    for scope in ("rollout", "eval-rollout"):
        write(run / scope / "3/1.jsonl", line(1, reward=1.0))
    for path, found in (
        (run, (run, "")),
        (tmp_path, (run, "")),
        (tmp_path / "rollout", (run, "")),
        (run / "rollout", (run, "rollout")),
        (run / "eval-rollout/3/1.jsonl", (run, "eval-rollout/3/1.jsonl")),
    ):
        assert _runs_at(path) == [found], path
