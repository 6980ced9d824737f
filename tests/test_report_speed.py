"""Reports of benches, replays and studies: cells by hand, what may share a table, figures, and our own results."""

import json
import sys
from pathlib import Path

import pytest
from test_profile_cli import made_up_fidelity, made_up_report
from test_report import CONDITIONS, PROFILE, SCORES, cells, make_run

from dustin_hf.eval.report.captions import heads
from dustin_hf.eval.report.decoding import decode_sections
from dustin_hf.eval.report.sources import Source, read_sources
from dustin_hf.eval.report.write import write_report

RESULTS = Path(__file__).parents[1] / "eval" / "results"
PHASES = {"draft": 2.0, "select": 0.5, "verify": 6.0, "accept": 0.5}


def row_of(arm, context, batch, speed, tau=None, **more):
    drafts = arm not in ("vanilla", "hf")
    found = {"arm": arm, "context": context, "batch": batch, "ragged": False, "gamma": 3 if drafts else 0}
    found |= {"budget": 512 if arm.startswith("dustin") else None, "tokens_per_s": speed, "tau": tau or 1.0}
    return {**found, "step_ms": 10.0, "phases_ms": PHASES, "steps": 20, **more}


def decode_of(*rows, **more):
    found = {"bench": "decode", "target": "big-7b", "draft": "small", "notes": "A note.", "conditions": CONDITIONS}
    return {**found, "acceptance": "simulated, tau = 2.2", "rows": list(rows), **more}


def kernels():
    step = {"shape": "big-72b", "draft": "small", "context": 16384, "batch": 8, "sparse_us": 1200.0, "select_us": 300.0}
    step |= {"step_us": 1500.0, "packed_ours_us": 9000.0, "packed_sdpa_us": 6000.0, "unpacked_flash_us": None}
    step |= {"times_packed_best": 4.0, "times_unpacked_flash": None, "select_share": 0.05}
    longer = {**step, "context": 32768, "packed_sdpa_us": None, "times_packed_best": 6.0, "unpacked_flash_us": 30000.0}
    longer["times_unpacked_flash"] = 20.0
    options = {"gamma": 4, "budget": 512, "dtype": "bfloat16"}
    return {"bench": "kernels", "conditions": CONDITIONS, "options": options, "notes": ["N."], "steps": [longer, step]}


def overhead():
    def row(name, context, us):
        return {"estimator": name, "context": context, "us": us, "attention_us": context / 2, "share": us / context * 2}

    rows = [
        row("naive", 4096, 4096.0),
        row("hybrid", 4096, 20.48),
        row("hybrid", 16384, 81.92),
        row("other", 16384, 8.0),
    ]
    about = {
        "bench": "overhead",
        "target": "big-7b",
        "draft": "small",
        "batch": 8,
        "notes": ["N."],
        "copy_rate_gb_s": 1,
    }
    return {**about, "rows": rows, "conditions": CONDITIONS}


def prefill():
    rows = [{"arm": "stock", "prompts": 2, "seconds": 2.5, "tokens_per_s": 26214.4, "peak_gb": 21.87}]
    rows.append({**rows[0], "arm": "ours", "seconds": 2.0, "tokens_per_s": 32768.0, "over_stock": 1.25})
    about = {"bench": "prefill", "target": "big-7b", "context": 32768, "notes": "N."}
    return {**about, "rows": rows, "conditions": CONDITIONS}


def fidelity():
    found = made_up_fidelity()
    settings = {"target": "/data/models/Big-7B", "draft": "org/small", "dtype": "torch.float32", "new_tokens": 8}
    settings |= {"gamma": 4, "sinks": 4, "window": 16, "profile": PROFILE}
    contexts = [{"name": "a", "tokens": 300}, {"name": "b", "tokens": 200}, {"name": "c", "tokens": 250}]
    pearson = {"runs": {"arr": -0.9, "arr_committed": None}, "windows": {"arr": -0.5, "arr_committed": -0.4}}
    return {**found, "definition": "Defined.", "settings": settings, "contexts": contexts, "pearson": pearson}


PRICES = ((0.7, 0.75), (0.72, 0.77))


def study():
    metadata = {"target": {"id": "/data/models/Big-7B"}, "draft": {"id": "org/small"}}
    metadata["versions"] = {"torch": "2.11.0", "optuna": "4.0"}
    about = {"definition": "Defined.", "settings": {"gamma": 4, "sinks": 4, "window": 16}, "held_out": ["b"]}
    about["conditions"] = {**CONDITIONS, "command": "dustin-hf profile --out study"}
    one, four = ({k: {"hybrid": x, "oracle": x + 0.1} for k, x in zip(("128", "512"), row)} for row in PRICES)
    about["prices"] = {"heads": {"1 + 4": one}, "groups": {"1": one, "4": four}}
    about["stability"] = {
        "target": {"all": {"seed": 0.9}, "profile": {"seed": 0.75}},
        "draft": {"all": {"seed": 0.8}, "profile": {"seed": 1.0}},
    }
    return {**made_up_report(), **about, "searched": ["a", "c"], "profile": {**PROFILE, "metadata": metadata}}


def test_profiles_in_words():
    """A share for each budget; a profile with layer groups is what its groups are."""
    assert heads(PROFILE) == "2 target heads of 1 layer, 3 draft heads of 2 layers, draft share 0.750"
    tuned = {**PROFILE, "draft_shares": {"512": 0.8, "128": 0.7}}
    assert heads(tuned).endswith("draft share 0.700 (k = 128) or 0.800 (k = 512)")
    grouped = {**tuned, "layer_groups": [{"first_layer": 0, **PROFILE}, {"first_layer": 9, **tuned}]}
    assert heads(grouped).startswith("2 layer groups: from layer 0 on 2 target heads of 1 layer, 3 draft heads")
    assert "; from layer 9 on 2 target heads" in heads(grouped)


def saved(folder, **contents):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return [folder / f"{name}.json" for name in contents]


def sections_of(*contents):
    return decode_sections([Source("decode", Path(f"{i}.json"), content) for i, content in enumerate(contents)])


def test_decoding_in_the_papers_layout():
    rows = [
        row_of("dustin-sparse", 16384, 8, 300.0, 2.204),
        row_of("vanilla", 16384, 8, 120.0),
        row_of("vanilla", 8192, 8, 200.0),
        row_of("classic", 8192, 8, 250.0, 2.196),
        row_of("hf", 8192, 8, None, error="OutOfMemoryError: too much"),
        row_of("dustin", 8192, 16, 500.0, 2.1),
        row_of("own-arm", 8192, 16, 50.0, 3.0),
    ]
    (section,) = sections_of(decode_of(*rows))
    (table,) = section.tables
    assert table.columns == (
        "Method", "Batch", "8K tok/s", "8K tau", "8K alpha", "16K tok/s", "16K tau", "16K alpha"
    )  # fmt: skip
    assert table.rows == (
        ("stock generate", "8", "-", "-", "-", "-", "-", "-"),
        ("Vanilla", "8", "200.0", "-", "1.00", "120.0", "-", "1.00"),
        ("ClassicSD", "8", "250.0", "2.20", "1.25", "-", "-", "-"),
        ("Dustin, sparse drafts", "8", "-", "-", "-", "300.0", "2.20", "2.50"),
        # no vanilla at that batch: no alpha
        ("Dustin", "16", "500.0", "2.10", "-", "-", "-", "-"),
        ("own-arm", "16", "50.0", "3.00", "-", "-", "-", "-"),
    )
    assert table.caption.startswith("Acceptance is simulated, tau = 2.2. tok/s: ")
    assert table.caption.endswith(" Failed: stock generate, 8 x 8K: OutOfMemoryError: too much.")
    assert section.conditions.startswith(
        "Target big-7b, draft small; acceptance simulated, tau = 2.2; gamma 3; budget 512. Measured on 2 x GPU 9"
    )
    assert section.conditions.endswith("Notes of the run: A note.")
    assert "Acceptance is simulated" in section.drawings[0].caption and "16 x 8K" in section.drawings[0].caption


def test_several_taus_have_a_line_each():
    rows = [row_of("vanilla", 8192, 8, 100.0)]
    rows += [row_of("classic", 8192, 8, 60.0 * tau, tau) for tau in (1.5, 2.5)]
    (section,) = sections_of(decode_of(*rows))
    assert section.tables[0].rows[1:] == (
        ("ClassicSD", "8", "90.0", "1.50", "0.90"),
        ("ClassicSD", "8", "150.0", "2.50", "1.50"),
    )
    assert [step.label for step in section.drawings[0].draw.args[0]] == [
        "Vanilla", "ClassicSD, tau 1.5", "ClassicSD, tau 2.5"
    ]  # fmt: skip


def test_what_may_share_a_table():
    first = decode_of(row_of("vanilla", 8192, 8, 100.0), row_of("dustin", 8192, 8, 200.0, 2.0))
    more = decode_of(row_of("vanilla", 8192, 16, 150.0), row_of("dustin", 8192, 16, 450.0, 2.0))
    (section,) = sections_of(first, more)
    assert [row[1:] for row in section.tables[0].rows] == [
        ("8", "100.0", "-", "1.00"), ("8", "200.0", "2.00", "2.00"), ("16", "150.0", "-", "1.00"),
        ("16", "450.0", "2.00", "3.00"),
    ]  # fmt: skip
    assert "0.json`" in section.conditions and "1.json`" in section.conditions
    # the same point again, another commit, acceptance, weights or budget: nothing of one is set against the other
    others = {
        "point": decode_of(row_of("vanilla", 8192, 8, 1.0), row_of("dustin", 8192, 8, 2.0, 2.0)),
        "commit": {**more, "conditions": {**CONDITIONS, "commit": "f" * 40}},
        "acceptance": {**more, "acceptance": "real: greedy"},
        "weights": {**more, "weights": "4 bits"},
        "budget": decode_of(row_of("vanilla", 8192, 16, 1.0), row_of("dustin", 8192, 16, 2.0, 2.0, budget=64)),
    }
    for name, other in others.items():
        assert len(sections_of(first, other)) == 2, name


def test_ragged_rows_stand_apart():
    ragged = [row_of("vanilla", 8192, 8, 100.0, ragged=True), row_of("dustin", 8192, 8, 300.0, 2.0, ragged=True)]
    sections = sections_of(decode_of(*ragged, row_of("hf", 8192, 8, 10.0)))
    assert [section.title.rpartition("acceptance ")[2] for section in sections] == [
        "simulated, ragged rows",
        "simulated",
    ]
    assert sections[0].tables[0].columns[2] == "up to 8K tok/s" and sections[0].tables[0].rows[1][-1] == "3.00"
    assert sections[1].tables[0].rows == (("stock generate", "8", "10.0", "-", "-"),)


def test_real_acceptance_has_steady_steps_and_old_text():
    def real(arm, speed, steady, tau, fresh):
        phases = {"phases_ms": None, "phases_s": {name: ms * 20 / 1e3 for name, ms in PHASES.items()}}
        more = {"steady_tokens_per_s": steady, "tau_fresh": fresh, "copied": 0.254, "repeated": 0.5}
        return row_of(arm, 8192, 8, speed, tau, **phases, **more)

    content = decode_of(real("vanilla", 100.0, 110.0, 1.0, 1.0), real("dustin", 150.0, 275.0, 3.0, None))
    (section,) = sections_of(
        {**content, "acceptance": "real: greedy, 9 tokens", "weights": "4 bits", "profile": "default"}
    )
    assert [table.rows[1][2:] for table in section.tables] == [
        ("150.0", "3.00", "1.50"), ("275.0", "3.00", "2.50"), ("25", "50", "-")
    ]  # fmt: skip
    assert all("Acceptance is real: greedy, 9 tokens." in table.caption for table in section.tables)
    assert "profile: default." in section.conditions and "Weights: 4 bits." in section.conditions
    (step, _) = section.drawings[0].draw.args[0]
    assert dict(step.phases) == pytest.approx(PHASES) and step.step_ms == 10.0


def test_a_mixed_report(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    loaded, before = "matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy()
    rows = row_of("vanilla", 8192, 8, 100.0), row_of("dustin", 8192, 8, 200.0, 2.0)
    files = saved(
        tmp_path / "in",
        decode=decode_of(*rows),
        kernels=kernels(),
        overhead=overhead(),
        prefill=prefill(),
        fid=fidelity(),
    )
    saved(tmp_path / "study", report=study())
    run = make_run(tmp_path / "runs", "hybrid", 64, SCORES["hybrid", 512])
    out = tmp_path / "out"
    write_report([*files, tmp_path / "study", run, files[0]], out)
    text = (out / "README.md").read_text()
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "LongBench: Big-7B with org/small",
        "Decoding: big-7b with small, acceptance simulated",
        "Self-attention: big-72b",
        "Estimation of importance: big-7b",
        "Prefill: big-7b",
        "Fidelity: Big-7B with org/small",
        "Attention recovery: Big-7B with org/small",
    ]
    assert "from 7 saved runs" in text and "/data" not in text and str(tmp_path) not in text
    tables = {path.stem: cells(path) for path in (out / "tables").glob("*.csv")}
    assert tables["attention-big-72b"][1:] == [
        ["16K", "8", "6.000", "1.200", "0.300", "1.500", "4.00", "-", "5.00", "25.00"],
        ["32K", "8", "9.000", "1.200", "0.300", "1.500", "6.00", "20.00", "3.33", "25.00"],
    ]
    assert tables["estimation-big-7b"] == [
        ["Estimator", "4K us", "4K %", "16K us", "16K %"],
        ["full-cache attention", "2048.0", "100.00", "8192.0", "100.00"],
        ["Dustin-H", "20.5", "1.00", "81.9", "1.00"],
        ["Naive", "4096.0", "200.00", "-", "-"],
        ["other", "-", "-", "8.0", "0.10"],
    ]
    assert tables["prefill-big-7b"][1:] == [
        ["stock", "2", "2.50", "26214", "21.9", "-"],
        ["ours", "2", "2.00", "32768", "21.9", "1.25"],
    ]
    assert tables["fidelity-big-7b"][1:3] == [
        ["full", "-", "0.9000", "0.0000", "1.0000", "0.9000"],
        ["oracle", "128", "0.9000", "0.0078", "0.9922", "0.8922"],
    ]
    assert tables["correlation-big-7b"][1:] == [["runs", "-0.9000", "-"], ["windows", "-0.5000", "-0.4000"]]
    assert tables["arr-big-7b"][:2] == [
        ["Policy", "ARR, k = 128", "ARR, committed, k = 128", "ARR, k = 512", "ARR, committed, k = 512"],
        ["hybrid", "0.6280", "0.5280", "1.0120", "0.9120"],
    ]
    assert "3 contexts of 200 to 300 tokens, 8 new tokens" in text and "1 of 3 texts held out" in text
    assert tables["prices-big-7b"] == [
        ["Sets", "hybrid, k = 128", "oracle, k = 128", "hybrid, k = 512", "oracle, k = 512"],
        ["1 + 4 heads", "0.7000", "0.8000", "0.7500", "0.8500"],
        ["4 layer groups", "0.7200", "0.8200", "0.7700", "0.8700"],
    ]
    assert tables["stability-big-7b"] == [
        ["Samples", "target, all", "target, profile", "draft, all", "draft, profile"],
        ["seed", "0.900", "0.750", "0.800", "1.000"],
    ]
    assert (
        "torch 2.11.0, transformers 5.17.0, optuna 4.0" in text and "Command: `dustin-hf profile --out study`" in text
    )
    check_figures(out, text)
    names = {path.relative_to(out / "figures").as_posix() for path in out.rglob("*.png")}
    assert {"fig1-step-big-7b-simulated.png", "fig7-fig10-attention-big-72b.png", "fig8-estimation-big-7b.png"} <= names
    assert {"replay-big-7b/arr_kl.png", "study-big-7b/layers.png"} <= names
    assert matplotlib.rcParams.copy() == before and ("matplotlib.pyplot" in sys.modules) == loaded


def check_figures(out, text):
    """Every figure is there twice, holds something, and is shown."""
    pictures = sorted(out.rglob("*.png"))
    assert sorted(out.rglob("*.svg")) == [path.with_suffix(".svg") for path in pictures]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
        drawn = path.with_suffix(".svg").read_text()
        assert drawn.startswith("<?xml") and "<svg" in drawn and drawn.rstrip().endswith("</svg>")
        name = path.relative_to(out).as_posix()
        assert f"![{path.stem}]({name})" in text and f"({name.removesuffix('png')}svg)" in text


def test_a_folder_of_results(tmp_path):
    """Files, runs and studies in it, however deep; none that has not ended."""
    kinds = {source.kind for source in read_sources([RESULTS])}
    assert {"longbench", "decode", "pg19", "study", "fidelity"} <= kinds
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.json.parts").mkdir()
    (tmp_path / "a" / "x.json.parts" / "config.json").write_text("{}")
    (tmp_path / "a" / "b" / "x.json").write_text(json.dumps(fidelity()))
    assert [source.path.name for source in read_sources([tmp_path])] == ["x.json"]


def test_our_own_results(tmp_path):
    """Every result of the repository; alphas are those that the benches computed for themselves."""
    pytest.importorskip("matplotlib")
    paths = sorted(RESULTS.glob("*.json"))
    out = tmp_path / "out"
    write_report(paths, out)
    text = (out / "README.md").read_text()
    check_figures(out, text)
    decoded = [source for source in read_sources(paths) if source.kind == "decode"]
    assert len(decoded) > 5 and all(f"`results/{source.path.name}`" in text for source in decoded)
    shown = [line for path in out.glob("tables/decode-*.csv") for line in cells(path)[1:]]
    for source in decoded:
        for row in source.content["rows"]:
            wanted = f"{row['tokens_per_s']:.1f}", f"{row['over_vanilla']:.2f}"
            assert any(
                (line[i], line[i + 2]) == wanted and line[1] == str(row["batch"])
                for line in shown
                for i in range(2, len(line), 3)
            ), (source.path.name, row["arm"])
    for path in out.glob("tables/decode-*.md"):
        kind = "simulated, tau = " if "simulated" in path.name else "real: greedy"
        assert f"\n\nAcceptance is {kind}" in path.read_text() and "NVIDIA H200" in path.read_text()
