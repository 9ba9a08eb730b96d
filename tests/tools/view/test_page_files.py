"""The page's own files: text cannot become markup, modules fit together, and an exported page is one safe file."""

from __future__ import annotations
import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
import pytest
from areal_lite.cli.main import main
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.filters import parse
from areal_lite.tools.view.single_file import bundle, export_page, page_with, script_json, static_files
from tests.tools.view.page_runs import EVIL, write_evil_run, write_run

FILES = {name: content.decode() for name, content in static_files().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_can_turn_text_into_markup_or_code(name: str) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc",
        r"\beval\s*\(|new Function|setTimeout\(\s*[\"'`]|javascript:|import\(",
        r"setAttribute\(\s*[\"'](on|style)|https?://(?!www\.w3\.org/2000/svg)",
    )
    assert [found for rule in forbidden for found in re.findall(rule, SCRIPTS[name])] == []


def test_page_and_styles_load_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?:|//|@import|url\(", FILES["page.css"])
    assert re.findall(r'(?:src|href)="([^"]*)"', FILES["index.html"]) == ["data:,", "static/page.css", "static/app.js"]
    assert not re.search(r"<script>|style=|\son\w+=", FILES["index.html"])


def test_imports_name_what_their_modules_export() -> None:
    for name, text in SCRIPTS.items():
        lines = re.findall(r"^import .*$", text, re.MULTILINE)
        for each in lines:
            match = re.fullmatch(r'import \{ ([\w, ]+) \} from "\./([\w.]+)";', each)
            assert match, f"{name}: {each}"
            for wanted in match[1].split(", "):
                pattern = rf"^export (async )?(function|const|class) {wanted}\b"
                assert re.search(pattern, SCRIPTS[match[2]], re.MULTILINE), f"{name}: {wanted}"


def test_the_bundle_has_every_module_once_after_those_it_needs() -> None:
    code = bundle(SCRIPTS)
    assert Counter(re.findall(r"^// (\w+\.js)$", code, re.MULTILINE)) == Counter(list(SCRIPTS))
    assert not re.search(r"^(import|export) ", code, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", code, re.MULTILINE)
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert "</script" not in code.lower() and "<!--" not in code


@pytest.mark.parametrize("text", EVIL)
def test_data_in_a_page_cannot_end_its_script_and_means_the_same(text: str) -> None:
    escaped = script_json({"text": text})
    assert not set(escaped) & set("<>&\u2028\u2029")
    assert json.loads(escaped) == {"text": text}


class _Parsed(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        self.content.setdefault(attributes.get("id") or tag, data)


def test_an_exported_page_is_one_file_whose_policy_allows_its_script_and_style(tmp_path: Path) -> None:
    write_evil_run(tmp_path / "e" / "evil")
    export_page([tmp_path / "e"], tmp_path / "page.html")
    page = _Parsed((tmp_path / "page.html").read_text())
    tags = [(tag, {key: value for key, value in values.items() if key != "content"}) for tag, values in page.tags]
    assert [tag for tag, _ in tags] == [
        *("html", "head", "meta", "meta", "meta", "meta", "title", "link", "style", "body", "script", "p", "noscript"),
        "script",
    ]
    assert tags[10][1] == {"type": "application/json", "id": "data"}
    assert not any("src" in values or values.get("href", "data:,") != "data:," for _, values in tags)
    policy = page.tags[3][1]["content"] or ""
    for directive, name in (("script-src", "script"), ("style-src", "style")):
        digest = base64.b64encode(hashlib.sha256(page.content[name].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    data = json.loads(page.content["data"])
    assert {row["error_type"] for row in data["rows"]} == set(EVIL)


def test_an_export_is_of_the_selection_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "calc" / "a", versions=2, groups=2)
    out = tmp_path / "page.html"
    assert main(["view", str(tmp_path), "--export", str(out), "--filter", "version=1"]) == 0
    assert "page.html: " in capsys.readouterr().out
    data = json.loads(_Parsed(out.read_text()).content["data"])
    assert {row["version"] for row in data["rows"]} == {1}
    assert {f"{row['run']} {row['id']}" for row in data["rows"]} <= data["places"].keys()
    monkeypatch.setattr("areal_lite.tools.view.single_file.MAX_LINES", 3)
    assert "3 sequences, the first of " in export_page([tmp_path], out)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--filter", "version=99"], "no episode matches the filter 'version=99'"),
        (["--filter", "rewrd=1"], "did you mean 'reward'?"),
    ],
)
def test_an_export_of_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    write_run(tmp_path / "calc" / "a", versions=1, groups=1)
    assert main(["view", str(tmp_path), "--export", str(tmp_path / "page.html"), *arguments]) == 64
    assert error in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "calc" / "a", versions=1, groups=1)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder cannot be written"):
        export_page([tmp_path], tmp_path / "folder")


def test_a_page_with_data_keeps_the_pages_own_text() -> None:
    assert page_with({"rows": []}).count("</script>") == 2


def _node(tmp_path: Path, code: str) -> object:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine; the browser tests cover it")
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(code)
    done = subprocess.run([node, tmp_path / "main.js"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_state_survives_the_address(tmp_path: Path) -> None:
    found = _node(
        tmp_path,
        """
        import { DEFAULTS, readState, writeState } from "./state.js";
        const filter = 'text~"a&b=c #?%20+" or reward<0.5';
        const states = [DEFAULTS, { ...DEFAULTS, view: "curves", extra: "a/b,c" },
          { ...DEFAULTS, filter, sort: "-tokens", run: "x/ü", id: "rollout/1/2.jsonl:3" }];
        const same = states.map((state) => JSON.stringify(readState(writeState(state))) === JSON.stringify(state));
        const junk = Object.keys(readState("#list?color=version&__proto__=1&other=2&filter=%zz"));
        const known = junk.join() === Object.keys(DEFAULTS).join();
        console.log(JSON.stringify({ same, first: writeState(DEFAULTS), known }));
        """,
    )
    assert found == {"same": [True, True, True], "first": "#episodes", "known": True}


def test_words_without_an_operator_search_the_texts(tmp_path: Path) -> None:
    typed = ["not sure", " 2+2? ", "a\\b", "reward<1", "(a)", 'say "no"', ""]
    code = """
        import { asFilter } from "./filter.js";
        console.log(JSON.stringify(TYPED.map(asFilter)));
        """.replace("TYPED", json.dumps(typed))
    found = _node(tmp_path, code)
    assert isinstance(found, list)
    assert found == [
        'text~"(?i)not\\s+sure"',
        'text~"(?i)2\\+2\\?"',
        'text~"(?i)a\\\\b"',
        *[each.strip() for each in typed[3:]],
    ]
    for filter in (*found[:3], ""):
        parse(filter)


def test_a_turn_is_named_and_told_by_what_it_is(tmp_path: Path) -> None:
    chat = "<|im_start|>system\nCall <tool_call>{}</tool_call>.<|im_end|>\n<|im_start|>user\nWhat is 2?<|im_end|>\n"
    call = '<think>hm</think><tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>'
    result = '<|im_start|>user\n<tool_response>{"sum": 4}</tool_response><|im_end|>\n<|im_start|>assistant\n'
    turns = [
        *({"role": "prompt", "text": text} for text in (f"{chat}<|im_start|>assistant\n", "<tool_call>x")),
        {"role": "assistant", "agent": "main", "text": call},
        {"role": "assistant", "agent": "critic", "text": "Good<|im_end|>"},
        *({"role": "environment", "text": text} for text in (result, "[1, 2]", None)),
    ]
    found = _node(
        tmp_path,
        """
        import { gist, question, speaker, spoken } from "./conversation.js";
        const turns = TURNS;
        const cut = "tail of it?<|im_end|>\\n<|im_start|>assistant\\n";
        const texts = [question(turns[0].text), question(cut), question(null),
          spoken("<think>a</think>\\n4 <|im_end|>")];
        console.log(JSON.stringify({ speakers: turns.map(speaker), gists: turns.map(gist), texts }));
        """.replace("TURNS", json.dumps(turns)),
    )
    assert found == {
        "speakers": ["system, user", "prompt", "assistant", "critic", "tool", "environment", "environment"],
        "gists": [
            *(["", "What is 2?"], ["", "<tool_call>x"], ["calls add", '{"x":2}'], ["", "Good"]),
            *(["tool result, JSON of sum", '{"sum": 4}'], ["2 entries", "[1, 2]"], ["", ""]),
        ],
        "texts": ["What is 2?", "tail of it?", "", "4"],
    }


HOLDS = {
    "": "11",
    "reward<0.5": "10",
    "reward>=0.25 status=failed": "10",
    "reward=none": "01",
    "reward!=0.25": "01",
    "stop=length": "10",
    "stop=none": "01",
    "task_id=8": "01",
    'error~"a .b"': "10",
    "text~(?i)hi": "10",
    "text!~hi": "11",
    'error="a \\"b\\""': "10",
    "reward/ok>0.5": "10",
    "reward/ok=none": "01",
}
"""Which of two rows a filter finds."""


def test_filters_of_an_exported_page_hold_as_the_servers_do(tmp_path: Path) -> None:
    found = _node(
        tmp_path,
        """
        import { offlineTest, quoted, termValue, withTerm } from "./filter.js";
        const kinds = { reward: "number", "reward/ok": "number",
          status: "text", task: "id", stop: "texts", error: "text", text: "all" };
        const alias = (name) => (name === "task" ? "task_id" : "");
        const keys = Object.entries(kinds).map(([name, kind]) => ({ name, alias: alias(name), kind }));
        const rows = [
          { reward: 0.25, status: "failed", task: "7", stop: ["stop", "length"], cause: 'a "b"', text: "Hi",
            numbers: { "reward/ok": 1 } },
          { reward: null, status: "accepted", task: "8", stop: [], cause: null, text: "no" },
        ];
        const hold = (filter) => rows.map(offlineTest(filter, keys, (row) => row.text)).map(Number).join("");
        let message = "";
        try { hold("reward<1 or reward>2"); } catch (error) { message = error.message; }
        const terms = [withTerm("a<1 status=failed", "status", null), withTerm("x=1 or y=2", "status", "failed"),
          termValue("status=failed", "status"), quoted('a "b"')];
        console.log(JSON.stringify({ holds: FILTERS.map(hold), message, terms }));
        """.replace("FILTERS", json.dumps(list(HOLDS))),
    )
    assert isinstance(found, dict)
    assert dict(zip(HOLDS, found["holds"], strict=True)) == HOLDS
    assert found["message"].startswith("filter, at 'or reward>2': an exported page takes terms joined by spaces")
    assert found["terms"] == ["a<1", "(x=1 or y=2) status=failed", "failed", '"a \\"b\\""']
