"""Files, folders and URLs become unchanged rows, or an error names the bad file and line."""

import bz2
import gzip
import logging
import lzma
import os
import subprocess
import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.data.rows.row_files import load_dataset
from areal_lite.data.supervised.tokenized_dataset import place_of_row
from areal_lite.errors import ConfigError, StorageError


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def load(cache):
    return lambda path: load_dataset(
        [str(p) for p in path] if isinstance(path, list) else str(path), cache_dir=str(cache)
    )


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def lines(*rows):
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def parquet(path, rows=ROWS):
    pa.parquet.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
    return path


def arrow(path, rows=ROWS):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return path


def zstd(content):
    return pa.Codec("zstd").compress(content, asbytes=True)


# --- kinds of files (V3, V4, R7, R-B9)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", lines(*ROWS)),
        ("x.json", lines(*ROWS)),
        ("x.json", orjson.dumps(ROWS)),
        ("x.json", orjson.dumps(ROWS, option=orjson.OPT_INDENT_2)),
        ("x.JSONL", b"\xef\xbb\xbf\n" + lines(*ROWS)),
        ("x.csv", "a,b\n1,x\n\n2,y\n"),
        ("x.jsonl.gz", gzip.compress(lines(*ROWS), mtime=0)),
        ("x.json.bz2", bz2.compress(orjson.dumps(ROWS))),
        ("x.csv.xz", lzma.compress(b"a,b\n1,x\n2,y\n")),
        ("x.csv.zst", zstd(b"a,b\n1,x\n2,y\n")),
        ("x.jsonl.zst", zstd(lines(*ROWS))),
    ],
)
def test_text_files_are_read_by_their_suffix_also_compressed(write, load, name, content):
    # R7, R-B9
    rows = load(write(name, content))
    assert isinstance(rows, datasets.Dataset)
    assert list(rows) == ROWS


@pytest.mark.parametrize("make", [parquet, arrow])
def test_parquet_and_arrow_files_are_read(tmp_path, load, make):
    # V3, V4, R7
    assert list(load(make(tmp_path / f"x.{make.__name__}"))) == ROWS


def test_lists_patterns_and_folders_are_joined_in_order(tmp_path, write, load):
    # V3, V4, R-B9
    one, two = (
        write("d/1.jsonl", lines({"a": 1})),
        write("d/2.jsonl.gz", gzip.compress(lines({"a": 2}), mtime=0)),
    )
    three = parquet(tmp_path / "3.parquet", [{"a": 3}])
    assert load([two, three, one])["a"][:] == [2, 3, 1]
    assert load(tmp_path / "d" / "*.jsonl*")["a"][:] == [1, 2]
    assert load(tmp_path / "**" / "*.jsonl")["a"][:] == [1]
    assert load(tmp_path / "d")["a"][:] == [1, 2]


def test_file_names_in_a_folder_determine_splits(tmp_path, write, load):
    # R7
    write("d/train.jsonl", lines({"a": 1}, {"a": 2}))
    write("d/test.jsonl", lines({"a": 3}))
    assert load(tmp_path / "d")["a"][:] == [1, 2]
    assert load(f"test@{tmp_path}/d")["a"][:] == [3]
    assert load(f"test+train[1:]@{tmp_path}/d")["a"][:] == [3, 2]
    with pytest.raises(ConfigError, match=r"no split 'dev'; the splits are \['test', 'train'\]"):
        load(f"dev@{tmp_path}/d")


def test_skipped_files_of_a_folder_are_logged(tmp_path, write, load, caplog):
    write("d/train.jsonl", lines({"a": 1}))
    write("d/more.jsonl", lines({"a": 2}))
    assert load(tmp_path / "d")["a"][:] == [1]
    assert ": skipped [" in caplog.text
    assert "more.jsonl" in caplog.text


def test_rows_support_lists_of_indices_and_are_not_copied_into_memory(write, load):
    rows = load(write("x.jsonl", lines(*({"a": n} for n in range(3000)))))
    assert len(rows) == 3000
    assert rows.__getitems__([2999, 0]) == [{"a": 2999}, {"a": 0}]
    assert rows.cache_files  # a table on disk


# --- split@path (R-B8)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(10)),
        ("train[:10%]", [0]),
        ("train[:3]", [0, 1, 2]),
        ("train[-2:]", [8, 9]),
        ("train[:1]+train[9:]", [0, 9]),
    ],
)
def test_a_split_before_the_path_slices_the_rows(write, load, split, expected):
    # R7, R-B8
    path = write("x.jsonl", lines(*({"a": n} for n in range(10))))
    assert load(f"{split}@{path}")["a"][:] == list(expected)


def test_only_split_syntax_before_the_at_sign_is_a_split(tmp_path, write, load, monkeypatch):
    # R-B8
    monkeypatch.chdir(tmp_path)
    for name in ("me@host/x.jsonl", "train@y.jsonl", "a@b@c.jsonl"):
        path = write(name, lines({"a": name}))
        assert load(path)["a"][:] == load(name)["a"][:] == [name]
        assert load(f"train[:1]@{path}")["a"][:] == [name]
    assert load(tmp_path / "me@host" / "*.jsonl")["a"][:] == ["me@host/x.jsonl"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", r"no split 'test'; the splits are \['train'\]"),
        ("train[:x]", r"Unrecognized instruction format.*write train, train\[:100\]"),
        ("train[5:]", "there are no rows"),
    ],
)
def test_an_unknown_split_names_the_existing_ones(write, load, split, message):
    with pytest.raises(ConfigError, match=message):
        load(f"{split}@{write('x.jsonl', lines(*ROWS))}")


# --- values stay what they were

_NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.none() | st.text(st.characters(codec="utf-8")),
                "day": st.none() | st.dates().map(str),
                "number": st.none() | st.integers(-(2**63), 2**63 - 1),
                "float": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "list": st.none() | st.lists(_NESTED, max_size=3),
                "dict": st.none() | st.dictionaries(st.text(st.characters(codec="utf-8")), _NESTED, max_size=3),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_json_values_come_back_as_they_were(tmp_path, load, rows):
    path = tmp_path / f"{abs(hash(orjson.dumps(rows)))}.jsonl"
    path.write_bytes(lines(*rows))
    assert list(load(path)) == rows


def test_a_date_stays_text_and_each_dict_keeps_its_own_keys(write, load):
    rows = [
        {"day": "2024-01-01", "info": {"at": ["2024-01-01T00:00:00"], "x": 1}},
        {"day": "2024-02-30", "info": {"y": "7"}},
    ]
    assert list(load(write("x.jsonl", lines(*rows)))) == rows


def test_integers_floats_and_nulls_may_share_a_column(write, load):
    values = [1, 2.5, None, 2**63, -0.0]
    assert load(write("x.jsonl", lines(*({"a": v} for v in values))))["a"][:] == values
    assert [type(v) for v in load(write("y.jsonl", lines({"a": 1}, {"a": 2.5})))["a"]] == [int, float]


def test_integers_have_64_bits_and_larger_ones_stay_exact(write, load):
    rows = load(write("x.jsonl", lines({"a": -(2**63), "b": 2**63})))
    assert list(rows) == [{"a": -(2**63), "b": 2**63}]
    assert rows.features["a"].dtype == "int64"


def test_a_cell_may_be_longer_than_the_default_limit_of_python(write, load):
    assert len(load(write("x.csv", "a\n" + "x" * 200_000 + "\n"))[0]["a"]) == 200_000


def test_a_missing_key_becomes_none(write, load):
    assert list(load(write("x.jsonl", '{"a": 1}\n{"b": "x"}\n'))) == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
    ]


def test_a_cell_is_a_number_only_if_it_prints_back_the_same(write, load):
    rows = list(load(write("x.csv", 'id,n,f,t,e\n007,1,1.5,NA,\n8,-2,3,"a,\nb",\n')))
    assert rows == [
        {"id": "007", "n": 1, "f": 1.5, "t": "NA", "e": None},
        {"id": "8", "n": -2, "f": 3, "t": "a,\nb", "e": None},
    ]


def test_integers_are_exact_up_to_64_bits_and_longer_cells_are_text(write, load):
    ids = [2**64 - 1, -(2**63), 2**53 + 1]
    assert load(write("x.jsonl", lines(*({"a": {"id": n}} for n in ids))))["a"][:] == [{"id": n} for n in ids]
    assert load(write("y.jsonl", b'{"a": "123456789012345678901", "b": 0.1234567890123456789}\n'))["a"][:] == [
        "123456789012345678901"
    ]
    assert load(write("x.csv", f"id\n1\n{2**64}\n"))["id"][:] == ["1", str(2**64)]


def test_a_changed_file_is_read_again(write, load):
    path = write("x.jsonl", lines({"a": 1}))
    assert load(path)["a"][:] == [1]
    path.write_bytes(lines({"a": 2}))
    os.utime(path, ns=(1, 1))
    assert load(path)["a"][:] == [2]


# --- what is damaged


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": \n{"a": 3}\n', "x.jsonl, line 2: not JSON"),
        (
            "x.jsonl",
            '{"a": 1}\n{"a": 2',
            "x.jsonl, line 2: not JSON.*The last line may be truncated: complete",
        ),
        ("x.jsonl", '{"a": 1}\n[1]\n', "x.jsonl, line 2: a list: each row must be an object"),
        ("x.jsonl", '{"a": NaN}\n', "line 1: not JSON"),
        ("x.jsonl", b"\x80\x01\x02\n", "line 1: not JSON"),
        (
            "x.jsonl",
            f'{{"a": 1}}\n{{"a": [{2**64}]}}\n',
            "line 2: the number 18446744073709551616 exceeds",
        ),
        (
            "x.jsonl",
            f'{{"a": 1{"0" * 300}}}\n',
            "line 1: the number 10+ exceeds 64 bits: write it in quotes",
        ),
        (
            "x.jsonl",
            '{"a": ' + "[" * 300 + "]" * 300 + "}\n",
            "line 1: a value cannot be stored.*nest it less",
        ),
        ("x.jsonl", "", "there are no rows"),
        ("x.jsonl", "\n\n", "there are no rows"),
        ("x.json", "[]", "there are no rows"),
        ("x.json", '[{"a": 1}, null]', "x.json, row 2: a null"),
        ("x.json", "[1,\n", "x.json: not JSON"),
        ("x.json", '{\n"a": 1\n}\n', "line 1: not JSON.*an object per line, or a list of them"),
        ("x.jsonl.gz", lines(*ROWS), "x.jsonl.gz: cannot be read.*does its type match its name"),
        ("x.jsonl.gz", gzip.compress(lines(*ROWS), mtime=0)[:-9], "x.jsonl.gz: cannot be read"),
        ("x.jsonl.zst", lines(*ROWS), "x.jsonl.zst: cannot be read"),
        ("x.parquet", lines(*ROWS), "x.parquet: cannot be read.*not a parquet file"),
        ("x.arrow", lines(*ROWS), "x.arrow: cannot be read"),
        ("x.csv", "a,b\n1,2\n1,2,3\n", "x.csv, line 3: 3 cells for 2 columns"),
        ("x.csv", "a,b\n1\n", "x.csv, line 2: 1 cells for 2 columns"),
        ("x.csv", 'a,b\n1,"2\n', "x.csv: cannot be read"),
        ("x.csv", "a,a\n1,2\n", r"duplicate column names in \['a', 'a'\]: rename one"),
        ("x.csv", "", "there are no rows"),
        ("x.csv", b"a\n\xff\n", "x.csv: cannot be read"),
    ],
)
def test_a_damaged_file_is_refused_with_file_and_line(write, load, name, content, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(write(name, content))


def test_only_the_last_line_may_be_truncated(write, load):
    with pytest.raises(ConfigError) as refused:
        load(write("x.jsonl", '{"a": \n{"a": 1}\n'))
    assert "truncated" not in str(refused.value)


def test_a_refused_file_leaves_nothing_in_the_cache(write, load, cache):
    with pytest.raises(ConfigError):
        load(write("x.jsonl", '{"a": 1}\n{'))
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_an_empty_table_is_refused_alone_and_ignored_beside_others(tmp_path, write, load):
    pa.parquet.write_table(pa.Table.from_pylist([], pa.schema([("a", pa.int64())])), tmp_path / "e.parquet")
    with pytest.raises(ConfigError, match="there are no rows"):
        load(tmp_path / "e.parquet")
    assert load([tmp_path / "e.parquet", write("x.jsonl", lines({"a": 1})), write("y.jsonl", "")])["a"][:] == [1]


def test_a_column_of_mixed_kinds_is_refused_with_both_rows(write, load):
    path = write("x.jsonl", '{"p": null}\n{"p": "text"}\n{"p": 1, "q": [1]}\n')
    with pytest.raises(ConfigError, match=r"x.jsonl, line 3: column 'p' is a number, but a text in .*, line 2"):
        load(path)
    first, second = write("a.jsonl", lines({"p": "text"})), write("b.jsonl", lines({"p": [1]}))
    with pytest.raises(ConfigError, match=r"b.jsonl, line 1: column 'p' is a list, but a text in .*a.jsonl, line 1"):
        load([first, second])


def test_files_with_different_columns_are_both_named(tmp_path, write, load):
    first, second = write("a.jsonl", lines({"p": 1})), write("b.jsonl", lines({"q": 1}))
    with pytest.raises(ConfigError, match=r"b.jsonl: its columns are \['q'\], but .*a.jsonl has \['p'\]"):
        load([first, second])
    with pytest.raises(ConfigError, match=r"c.parquet: its columns are \['a', 'b'\], but .*a.jsonl has \['p'\]"):
        load([first, parquet(tmp_path / "c.parquet")])


def test_files_with_different_types_are_widened_or_both_named(tmp_path, write, load):
    whole = parquet(tmp_path / "a.parquet", [{"p": 1}])
    broken = parquet(tmp_path / "b.parquet", [{"p": 1.5}])
    assert load([whole, broken])["p"][:] == [1.0, 1.5]
    with pytest.raises(ConfigError, match=r"c.jsonl: column 'p' is a text .*but a number in .*a.parquet"):
        load([whole, write("c.jsonl", lines({"p": "x"}))])


def test_types_are_widened_only_where_files_differ(tmp_path, load):
    same = [parquet(tmp_path / f"{n}.parquet", pa.table({"p": pa.array([n], pa.int32())})) for n in (1, 2)]
    assert load(same).features["p"].dtype == "int32"
    texts = [
        parquet(tmp_path / f"{t}.parquet", pa.table({"p": pa.array(["x"], t)})) for t in (pa.utf8(), pa.large_utf8())
    ]
    assert load(texts)["p"][:] == ["x", "x"]


def test_a_column_without_values_takes_the_type_of_other_files(tmp_path, write, load):
    dicts = parquet(tmp_path / "b.parquet", [{"p": {"a": 1}}])
    assert load([write("a.jsonl", lines({"p": None})), dicts])["p"][:] == [None, {"a": 1}]


def test_text_never_becomes_bytes(tmp_path, write, load):
    texts = write("a.jsonl", lines({"p": "x"}))
    for kind in (pa.binary(), pa.large_binary()):
        data = parquet(tmp_path / "b.parquet", pa.table({"p": pa.array([b"x"], kind)}))
        for files in ([texts, data], [data, texts]):
            with pytest.raises(ConfigError, match=r"column 'p' is a .*binary.*use one type"):
                load(files)


def test_of_several_columns_the_one_that_differs_is_named(tmp_path, write, load):
    first = parquet(tmp_path / "a.parquet", [{"same": 1, "none": None, "p": 1}])
    with pytest.raises(ConfigError, match="b.jsonl: column 'p' is a text"):
        load([first, write("b.jsonl", lines({"same": 1, "none": "x", "p": "x"}))])


def test_the_place_of_a_row_is_its_first_in_the_text_files(tmp_path, cache, write, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = [str(parquet(tmp_path / "a.parquet")), write("x.jsonl", lines(*ROWS)).as_uri()]
    place = place_of_row(paths, ROWS[1], cache_dir=str(cache))
    assert place.endswith("-x.jsonl, line 2")
    assert place.startswith(str(cache))
    assert place_of_row(paths, {"a": 1, "b": "y"}, cache_dir=str(cache)) == ""
    assert not (tmp_path / "home").exists()


def test_a_missing_file_names_a_similar_one(write, load):
    path = write("train.jsonl", lines(*ROWS))
    with pytest.raises(ConfigError, match=r"no such file or folder; did you mean 'train.jsonl'\?"):
        load(path.with_name("trian.jsonl"))
    with pytest.raises(ConfigError, match=r"no file matches .*\*.csv"):
        load(path.with_name("*.csv"))


def test_a_missing_relative_path_is_no_name_on_the_hub(write, load, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write("d/train.jsonl", lines(*ROWS))
    with pytest.raises(ConfigError, match=r"no such file or folder; did you mean 'train.jsonl'\?"):
        load("d/trian.jsonl")
    with pytest.raises(ConfigError, match=r"no such file or folder \(looked in"):
        load(tmp_path / "gone" / "folder")


def test_a_file_of_unknown_type_names_the_known_ones(write, load):
    with pytest.raises(ConfigError, match=r"x.foo: unknown file type: rename it to one of .json, .jsonl, .csv"):
        load(write("x.foo", "a"))


def test_an_unreachable_hub_name_is_refused_with_a_hint(load, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"(?s)openai/gsm8k: .*a dataset on the hub that this machine can reach.*hf://"
    ):
        load("openai/gsm8k")


# --- remote files (V3)


def test_a_remote_file_is_copied_once_and_read_from_its_copy(write, load, cache):
    # V3
    path = write("x.jsonl", lines(*ROWS))
    assert list(load(path.as_uri())) == ROWS
    path.unlink()
    assert list(load(path.as_uri())) == ROWS
    assert [copy.name.split("-")[1] for copy in (cache / "files").iterdir()] == ["x.jsonl"]


def test_remote_patterns_splits_and_lists_work(tmp_path, write, load):
    write("d/1.jsonl", lines({"a": 1}))
    write("d/2.jsonl", lines({"a": 2}))
    address = (tmp_path / "d").as_uri()
    assert load(f"{address}/*.jsonl")["a"][:] == [1, 2]
    assert load([f"train[:1]@{address}/2.jsonl", f"{address}/1.jsonl"])["a"][:] == [2, 1]


@pytest.mark.parametrize("address", ["memory://nothing/x.jsonl", "nosuchprotocol://x.jsonl", "file:///no/*.jsonl"])
def test_a_remote_file_that_cannot_be_copied_is_an_error(load, cache, address):
    with pytest.raises(ConfigError, match=r"cannot be copied|no file matches"):
        load(address)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_the_default_cache_is_below_the_home_folder(write, tmp_path, monkeypatch):
    # V3
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_dataset(str(write("x.jsonl", lines(*ROWS))))
    assert list((tmp_path / "home/.cache/areal_lite/tables").iterdir())


@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_a_cache_that_is_full_or_not_writable_is_an_error_that_names_it(tmp_path, cache, write, load, options):
    rows = [{"a": str(n) * 40, "b": n} for n in range(1000)]
    text, table = write("x.jsonl", lines(*rows)), parquet(tmp_path / "x.parquet", rows)
    cache.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", cache], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        for path in (text, table):
            with pytest.raises(StorageError, match=f"the cache {cache}.* cannot be written: .*or set cache_dir"):
                load(path)
    finally:
        subprocess.run(["umount", cache], check=True)


def test_loading_prints_nothing_and_restores_progress_bars(tmp_path, load, capfd, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    datasets.enable_progress_bars()
    level = datasets.logging.get_verbosity()
    load(parquet(tmp_path / "x.parquet"))
    for damaged in (arrow(tmp_path / "y.parquet"), parquet(tmp_path / "y.arrow")):
        with pytest.raises(ConfigError):
            load(damaged)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == level


# --- load_rows


def test_max_samples_takes_the_first_rows_or_a_seeded_choice_in_order(write, cache):
    # V2
    path = write("x.jsonl", lines(*({"a": n} for n in range(100))))

    def some(seed=1, **settings):
        rows = load_rows(DatasetConfig(path=str(path), cache_dir=str(cache), **settings), seed=seed)
        return [row["a"] for row in rows]

    assert some(max_samples=3, shuffle=False) == [0, 1, 2]
    assert some(max_samples=100) == some(max_samples=101) == some() == list(range(100))
    chosen = some(max_samples=5)
    assert chosen == sorted(chosen) == some(max_samples=5) != some(2, max_samples=5)
    assert len(set(chosen)) == 5


def test_kwargs_are_refused_for_a_file(write, cache):
    with pytest.raises(ConfigError, match="do not apply to a file"):
        load_rows(DatasetConfig(path=str(write("x.jsonl", '{"a": 1}')), kwargs={"size": 3}, cache_dir=str(cache)))


def test_a_folder_without_a_train_split_before_a_file_is_named(write, load):
    path = write("folder/test.jsonl", lines(*ROWS))
    with pytest.raises(ConfigError, match="no split 'train'"):
        load([str(path.parent), str(write("r.jsonl", lines(*ROWS)))])
