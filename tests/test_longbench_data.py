"""LongBench's samples: folders, archives, and files that are missing, damaged or not LongBench's."""

import gzip
import json
import zipfile

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from dustin_hf.eval.longbench import Sample, load_samples


def record(task, number=0, **changes):
    return {
        "input": f"question {number}",
        "context": "one\u2028line, 一行",  # a separator that Python counts as the end of a line, and JSON does not
        "answers": ["yes", "ja"],
        "length": 7,
        "dataset": task,
        "language": "en",
        "all_classes": ["City", "Date"] if task == "trec" else None,
        "_id": f"id-{number}",
        **changes,
    }


def lines(*records):
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records).encode()


def test_folder(tmp_path):
    (tmp_path / "trec.jsonl").write_bytes(lines(record("trec")))
    (tmp_path / "lcc.jsonl.gz").write_bytes(gzip.compress(lines(*(record("lcc", i) for i in range(3)))))
    found = load_samples(["lcc", "trec"], tmp_path)
    assert list(found) == ["lcc", "trec"] and [sample.id for sample in found["lcc"]] == ["id-0", "id-1", "id-2"]
    context = record("trec")["context"]
    assert found["trec"] == [
        Sample("question 0", context, ("yes", "ja"), 7, "trec", "en", ("City", "Date"), "id-0"),
    ]
    assert found["lcc"][0].all_classes is None
    assert load_samples(["lcc"], str(tmp_path)) == {"lcc": found["lcc"]}


def test_limit_takes_the_first_and_reads_no_further(tmp_path):
    data = lines(record("lcc", 0)) + b"\n" + lines(record("lcc", 1)) + b"{broken\n"
    (tmp_path / "lcc.jsonl").write_bytes(data)
    assert [sample.id for sample in load_samples(["lcc"], tmp_path, limit=2)["lcc"]] == ["id-0", "id-1"]
    with pytest.raises(ValueError, match="line 4 cannot be read"):
        load_samples(["lcc"], tmp_path, limit=3)
    with pytest.raises(ValueError, match="`limit` must be at least 1 sample of each task, got 0"):
        load_samples(["lcc"], tmp_path, limit=0)


@pytest.mark.parametrize(
    "second, message",
    [
        (b"{broken", "JSONDecodeError"),
        (b'"text"', "expected a JSON object, got str"),
        (b"\xff\xfe\xff", "Unicode"),
        (lines(record("lcc", answers="yes")), "expected 'answers' to be a list, got 'yes'"),
        (lines(record("lcc", answers=[1])), "expected 'answers' and 'all_classes' to hold texts"),
        (lines(record("lcc", all_classes="City")), "expected 'all_classes' to be a list or null, got 'City'"),
        (lines({"input": "x"}), "expected 'context' to be a str, got None"),
        (lines(record("lcc")), "'_id' '[^']*' is that of a sample before"),
        (lines(record("trec")), "expected 'dataset' to be 'lcc', as the file's name, got 'trec'"),
    ],
)
def test_corrupt_line_names_file_and_line(second, message, tmp_path):
    (tmp_path / "lcc.jsonl").write_bytes(lines(record("lcc")) + second)
    with pytest.raises(ValueError, match=rf"lcc\.jsonl, line 2 cannot be read .*{message}"):
        load_samples(["lcc"], tmp_path)


def test_damaged_files(tmp_path):
    whole = gzip.compress(lines(*(record("lcc", i) for i in range(50))))
    for name, data in (("cut", whole[:-30]), ("flipped", whole[:60] + b"\xff" * 20 + whole[80:]), ("other", b"text")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lcc.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match=r"lcc\.jsonl\.gz, line [0-9]+ cannot be read"):
            load_samples(["lcc"], folder)
    (tmp_path / "lcc.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"lcc\.jsonl holds no sample"):
        load_samples(["lcc"], tmp_path)


def test_missing_task_lists_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no file for lcc; it holds no \.jsonl file"):
        load_samples(["lcc"], tmp_path)
    for name in ("trec.jsonl", "qasper.jsonl.gz", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"no file for lcc; it holds qasper\.jsonl\.gz, trec\.jsonl$"):
        load_samples(["lcc"], tmp_path)
    with pytest.raises(ValueError, match="no task 'lccc'; expected one of"):
        load_samples(["lccc"], tmp_path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands for the Hub: a function that puts files into the archive it gives out."""
    path = tmp_path / "data.zip"

    def download(repo_id, filename, *, repo_type):
        assert (repo_id, filename, repo_type) == ("THUDM/LongBench", "data.zip", "dataset")
        return str(path)

    def put(files):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return put


def test_hub(hub, tmp_path):
    files = {f"data/{task}.jsonl": lines(*(record(task, i) for i in range(3))) for task in ("lcc", "trec")}
    hub({"data/": b"", **files})
    (tmp_path / "lcc.jsonl").write_bytes(files["data/lcc.jsonl"])
    found = load_samples(["trec", "lcc"], limit=2)
    assert {task: len(samples) for task, samples in found.items()} == {"trec": 2, "lcc": 2}
    assert found["lcc"] == load_samples(["lcc"], tmp_path, limit=2)["lcc"]
    with pytest.raises(FileNotFoundError, match=r"no file for vcsum; it holds .*data/lcc\.jsonl, data/trec\.jsonl"):
        load_samples(["vcsum"])
    hub({"data/lcc.jsonl": files["data/lcc.jsonl"] + b"{broken"})
    with pytest.raises(ValueError, match=r"data\.zip, data/lcc\.jsonl, line 4 cannot be read"):
        load_samples(["lcc"])


def test_damaged_archive(hub):
    path = hub({"data/lcc.jsonl": lines(*(record("lcc", i) for i in range(50)))})
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xff" * 20 + whole[120:])
    with pytest.raises(ValueError, match=r"data/lcc\.jsonl, line [0-9]+ cannot be read"):
        load_samples(["lcc"])
    path.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"data\.zip cannot be read .* remove it"):
        load_samples(["lcc"])


@pytest.mark.parametrize(
    "error", [OfflineModeIsEnabled("offline"), LocalEntryNotFoundError("no connection"), OSError()]
)
def test_hub_out_of_reach(error, monkeypatch):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match="cannot be fetched from the Hub .*: pass a `folder`"):
        load_samples(["lcc"])
