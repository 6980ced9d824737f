"""DustinConfig, DustinProfile, and the registry of policies: round trips, defaults, refusals."""

import json
import shutil
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import dustin, plain

import dustin_hf
from dustin_hf import DustinConfig, DustinProfile, Selection, SelectionPolicy, register_policy, unregister_policy
from dustin_hf import profile as profile_module
from dustin_hf.cards import model_card
from dustin_hf.drafting import streaming_slots
from dustin_hf.profile import CARD_NAME, PROFILE_NAME, SHIPPED, LayerGroup, config_hash
from dustin_hf.selection import _FACTORIES, HybridPolicy, build_policy, policy_names
from dustin_hf.testing import random_prompts, tiny_model


def test_config_round_trip():
    config = DustinConfig.from_cache_config({"budget": 64, "mode": "draft", "draft_share": 0.5})
    assert DustinConfig.from_cache_config(config.to_dict()) == config
    assert DustinConfig.from_cache_config(None) == DustinConfig()


def test_cache_config_of_the_user_is_left_alone(pair):
    options = {"budget": 64, "sinks": 2}
    dustin(pair.target, pair.M, random_prompts([5]), config=options, new=3)
    assert options == {"budget": 64, "sinks": 2}


@pytest.mark.parametrize("value", [True, 3.0, "8", -1])
def test_numbers_are_checked(value):
    with pytest.raises(ValueError, match="`window` must be a non-negative integer"):
        DustinConfig(window=value)


def test_profile_round_trip(tmp_path):
    profile = DustinProfile({1: (0, 3)}, {0: [1], 2: (2,)}, 0.625, 3, "abc", None)
    path = profile.save_pretrained(tmp_path / "new")
    assert path == tmp_path / "new" / PROFILE_NAME
    assert json.loads(path.read_text())["schema_version"] == 1
    for source in (tmp_path / "new", path, str(path)):
        assert DustinProfile.from_pretrained(source) == profile


def test_layer_groups_of_a_profile(tmp_path):
    groups = LayerGroup(0, {0: (0,)}, {1: (2,)}, 0.5), LayerGroup(2, {0: (0,), 1: (1,)}, {0: (3,)}, 0.75, {64: 0.25})
    profile = DustinProfile({0: (1,)}, {0: (1,)}, layer_groups=groups)
    profile.save_pretrained(tmp_path)
    assert DustinProfile.from_pretrained(tmp_path) == profile
    assert [group.share_for(100) for group in profile.layer_groups] == [0.5, 0.25]
    assert "| 2 | 0: 0; 1: 1 | 0: 3 |" in (tmp_path / "README.md").read_text()
    config = tiny_model(num_hidden_layers=3).config
    profile.check_pair(config, config)
    with pytest.raises(ValueError, match=r"layer groups that begin at \[0, 2\], but this target has 2 layers"):
        profile.check_pair(tiny_model().config, config)
    with pytest.raises(ValueError, match=r"names heads \(9,\) of draft layer 0"):
        replace(profile, layer_groups=(replace(groups[0], draft_heads={0: (9,)}),)).check_pair(config, config)
    for bad, what in [
        (groups[1:], "must begin at layer 0 and go on in order"),
        ((groups[0], groups[0]), "must begin at layer 0 and go on in order"),
        ((groups[0], replace(groups[1], target_heads={0: (1,)})), "must agree on the `target_heads` of a layer"),
    ]:
        with pytest.raises(ValueError, match=what):
            replace(profile, layer_groups=bad)
    for changes, what in [({"draft_share": 2}, "`draft_share` must"), ({"target_heads": {}}, "`target_heads` must")]:
        with pytest.raises(ValueError, match=what):
            replace(groups[0], **changes)


def test_profile_from_the_hub(tmp_path, monkeypatch):
    profile = DustinProfile({1: (0,)}, {0: (1,)})
    path = profile.save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: asked.append((a, k)) or str(path))
    assert DustinProfile.from_pretrained("someone/profile", revision="main") == profile
    assert asked == [(("someone/profile", PROFILE_NAME), {"revision": "main"})]


SEARCHED = DustinProfile(
    {17: (0, 3)},
    {9: (1,), 4: (2, 5)},
    0.75,
    4,
    draft_shares={128: 0.5, 512: 0.75},
    metadata={
        "target": {"id": "Qwen/Qwen2.5-7B-Instruct"},
        "draft": {"id": "/models/small"},
        "arr": {"128": {"hybrid": 0.91234, "oracle": 0.93}, "512": {"hybrid": 0.95, "oracle": 0.97, "more": 0.5}},
        "date": "2026-01-02",
    },
)


def test_profile_with_shares_and_metadata_round_trip(tmp_path):
    path = SEARCHED.save_pretrained(tmp_path)
    assert DustinProfile.from_pretrained(tmp_path) == SEARCHED
    assert json.loads(path.read_text())["draft_shares"] == {"128": 0.5, "512": 0.75}


def test_profiles_of_older_releases_load(tmp_path):
    path = DustinProfile({1: (0,)}, {0: (1,)}).save_pretrained(tmp_path)
    content = json.loads(path.read_text())
    del content["draft_shares"], content["metadata"]
    path.write_text(json.dumps(content))
    assert DustinProfile.from_pretrained(path) == DustinProfile({1: (0,)}, {0: (1,)})


@pytest.mark.parametrize("budget, share", [(1, 0.5), (128, 0.5), (255, 0.5), (257, 0.75), (512, 0.75), (9999, 0.75)])
def test_the_share_of_the_nearest_budget(budget, share):
    assert SEARCHED.share_for(budget) == share
    assert DustinProfile({1: (0,)}, {0: (1,)}, 0.625).share_for(budget) == 0.625


def test_card_of_a_profile(tmp_path):
    SEARCHED.save_pretrained(tmp_path)
    card = (tmp_path / CARD_NAME).read_text()
    _, header, body = card.split("---\n", 2)
    fields = yaml.safe_load(header)
    assert fields["base_model"] == ["Qwen/Qwen2.5-7B-Instruct"] and "speculative-decoding" in fields["tags"]
    for line in [
        "# Dustin profile of Qwen/Qwen2.5-7B-Instruct with /models/small",
        "| target, last committed token | 17: 0, 3 |",
        "| draft, lookahead | 9: 1; 4: 2, 5 |",
        "Of the budget k the draft chooses m: 0.500 (k = 128), 0.750 (k = 512), as a share.",
        "| budget | hybrid | oracle | more |",
        "| 128 | 0.9123 | 0.9300 |  |",
        'dustin_hf.enable(target, profile="path/or/hub-id")',
        "## Limits",
        ' "date": "2026-01-02"',
    ]:
        assert line in body.split("\n")
    plain_card = model_card(DustinProfile({1: (0,)}, {0: (1,)}))
    assert (
        "chooses m: 0.750, as a share." in plain_card
        and "recovery rate\n" not in plain_card
        and "base_model" not in plain_card
    )


def test_card_shows_plots_and_layer_groups(tmp_path):
    group = LayerGroup(0, {3: (0,)}, {1: (2,)}, 0.7, {128: 0.6, 512: 0.8})
    grouped = replace(SEARCHED, layer_groups=(group,))
    (tmp_path / "made").mkdir()
    for name in ("b.png", "a.png"):
        (tmp_path / "made" / name).write_bytes(b"png")
    grouped.save_pretrained(tmp_path / "saved", [tmp_path / "made" / "b.png", tmp_path / "made" / "a.png"])
    grouped.save_pretrained(tmp_path / "saved")  # they stay
    card = (tmp_path / "saved" / CARD_NAME).read_text()
    assert "![a](plots/a.png)\n\n![b](plots/b.png)" in card
    assert (tmp_path / "saved" / "plots" / "a.png").read_bytes() == b"png"
    assert "| 0 | 3: 0 | 1: 2 | 0.600 (k = 128), 0.800 (k = 512) |" in card and "chooses m" not in card
    assert "`by_groups` is of one set for all layers" in card
    assert "![" not in model_card(SEARCHED)


def test_a_readme_of_others_stays(tmp_path):
    card = tmp_path / CARD_NAME
    SEARCHED.save_pretrained(tmp_path)
    DustinProfile({3: (0,)}, {0: (1,)}).save_pretrained(tmp_path)
    assert "3: 0" in card.read_text()
    card.write_text("mine")
    SEARCHED.save_pretrained(tmp_path)
    assert card.read_text() == "mine" and DustinProfile.from_pretrained(tmp_path) == SEARCHED


def test_push_to_the_hub(tmp_path, monkeypatch):
    """A local folder stands in for the Hub."""
    asked = []

    def create(repo_id, **kwargs):
        asked.append((repo_id, kwargs))
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def upload(*, repo_id, folder_path, **kwargs):
        asked.append((repo_id, kwargs))
        shutil.copytree(folder_path, tmp_path / repo_id)
        return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr("huggingface_hub.create_repo", create)
    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    assert SEARCHED.push_to_hub("profile", private=True, token="t", revision="main") == "https://hub/commit"
    assert asked == [
        ("profile", {"private": True, "token": "t", "exist_ok": True}),
        ("someone/profile", {"token": "t", "revision": "main", "commit_message": "Upload Dustin profile"}),
    ]
    pushed = tmp_path / "someone" / "profile"
    assert DustinProfile.from_pretrained(pushed) == SEARCHED
    assert 'profile="someone/profile"' in (pushed / CARD_NAME).read_text()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"draft_shares": {"512": 1.5}}, "`draft_shares` must map budgets to shares between 0 and 1"),
        ({"draft_shares": {"0": 0.5}}, "`draft_shares`"),
        ({"draft_shares": [0.5]}, "is not a Dustin profile"),
        ({"schema_version": 2}, "`schema_version` of a profile must be 1, got 2"),
        ({"draft_share": -0.1}, "`draft_share`"),
        ({"target_heads": {}}, "`target_heads` must name at least one head"),
        ({"draft_heads": {0: ()}}, "`draft_heads` must name at least one head"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens`"),
        ({"nonsense": 1}, "is not a Dustin profile"),
    ],
)
def test_bad_profile_files(tmp_path, changes, message):
    path = DustinProfile({1: (0,)}, {0: (1,)}).save_pretrained(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        DustinProfile.from_pretrained(tmp_path)


def test_default_profile_is_as_stated():
    target = tiny_model(num_hidden_layers=5).config
    profile = DustinProfile.default(target, tiny_model().config)
    assert profile.target_heads == {3: (0, 1, 2, 3)} and profile.draft_heads == {1: (0, 1, 2, 3)}
    assert profile.draft_share == 0.75 and profile.num_assistant_tokens is None
    profile.check_pair(target, tiny_model().config)


def test_config_hash_is_of_the_shape():
    assert config_hash(tiny_model(seed=0).config) == config_hash(tiny_model(seed=1).config)
    assert config_hash(tiny_model().config) != config_hash(tiny_model(vocab_size=168).config)
    assert config_hash(tiny_model().config) != config_hash(tiny_model("llama").config)


@pytest.mark.parametrize("sinks, size", [(0, 4), (2, 5), (4, 4), (3, 8)])
def test_streaming_slots(sinks, size):
    """MagicDec: the first sinks and the most recent size - sinks, each slot once."""
    lengths = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6, 9, 30])
    slots = streaming_slots(lengths, sinks, size)
    assert slots.shape == (1, len(lengths), 1, size) and slots.dtype == torch.int32
    for row, n in zip(slots[0, :, 0].tolist(), lengths.tolist()):
        expected = {i for i in range(max(n, 0)) if i < sinks or i >= n - (size - sinks)}
        used = [i for i in row if i >= 0]
        assert sorted(used) == sorted(expected)


class EveryOther(SelectionPolicy):
    """Even slots for layer 0, odd ones for layer 1; and each head its own set."""

    def select(self, signals):
        slots = torch.arange(signals.target_cache.capacity)
        sets = []
        for parity in (0, 1):
            chosen = (slots % 2 == parity) & (slots < signals.lengths[:, None])
            sets.append(torch.where(chosen, slots, -1)[:, None].expand(-1, 2, -1))
        return Selection(torch.stack(sets).int(), layer_sets=(0, 1))


def test_policies_of_others(pair):
    """The interface is wider than Dustin: sets per layer group and per head, under a name of one's own."""
    register_policy("every-other", lambda context: EveryOther())
    try:
        assert "every-other" in policy_names()
        with pytest.raises(ValueError, match="'every-other' is already a selection policy"):
            register_policy("every-other", lambda context: EveryOther())
        rows, out = dustin(pair.target, pair.M, random_prompts([40, 80]), config={"mode": "every-other"}, new=12)
        steps = len(out.stats.committed[1])
        assert 0.5 < out.stats.kv_read_share < 0.5 + 1 / steps + 0.1
        assert rows != dustin(pair.target, pair.M, random_prompts([40, 80]), new=12)[0]
    finally:
        del _FACTORIES["every-other"]


def test_sparse_drafts_under_policies_of_others(pair):
    """What counts is whether a policy scores drafts, whatever it is called."""

    def scoring(context):
        scorers = {"target": context.target_scorer, "draft": context.draft_scorer}
        return HybridPolicy(k=24, sinks=2, window=3, m=10, **scorers)

    register_policy("mine", scoring)
    try:
        prompts = random_prompts([60, 80])
        sparse = dustin(pair.target, pair.M, prompts, budget=24, config={"mode": "mine", "draft_cache": "sparse"})[1]
        auto = dustin(pair.target, pair.M, prompts, budget=24, config={"mode": "mine"})[1]
        assert torch.equal(sparse.sequences, auto.sequences) and sparse.stats.committed == auto.stats.committed
    finally:
        del _FACTORIES["mine"]
    with pytest.raises(ValueError, match="follows the draft's scores, which this policy does not make"):
        dustin(pair.target, pair.M, prompts, budget=24, config={"draft_cache": "sparse", "draft_share": 0})


def test_shipped_profiles_are_found_by_the_shapes_of_a_pair(tmp_path, monkeypatch, caplog):
    target, draft = tiny_model(seed=0), tiny_model(seed=1, num_hidden_layers=1)
    made = DustinProfile({0: (1,)}, {0: (2,)}, 0.5, None, config_hash(target.config), config_hash(draft.config))
    (tmp_path / "pair.json").write_text(json.dumps(made.to_dict()))
    monkeypatch.setattr(profile_module, "SHIPPED", tmp_path)
    profile_module._all_shipped.cache_clear()
    try:
        assert DustinProfile.shipped(target.config, draft.config) == made
        assert DustinProfile.shipped(draft.config, target.config) is None
        seen = []
        monkeypatch.setattr("dustin_hf.assembly.build_policy", lambda c: seen.append(c.profile) or build_policy(c))
        with dustin_hf.enable(target):
            for assistant in (draft, target):
                options = {"assistant_model": assistant, "cache_implementation": "dustin", "max_new_tokens": 3}
                target.generate(torch.tensor([[5, 6, 7]]), **options)
        assert seen == [made, DustinProfile.default(target.config, target.config)]
    finally:
        profile_module._all_shipped.cache_clear()


def test_every_shipped_profile_is_one():
    assert len(list(SHIPPED.glob("*.json"))) >= 2
    for path in SHIPPED.glob("*.json"):
        found = DustinProfile.from_pretrained(path)
        assert found.target_hash and found.draft_hash and found.metadata["arr"] and found.draft_shares


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"target_heads": {0: 3}}, "`target_heads` must map layers to whole numbers"),
        ({"target_heads": None}, "`target_heads` must map layers to whole numbers"),
        ({"draft_heads": {0: (1.7,)}}, "`draft_heads` must map layers to whole numbers"),
        ({"draft_heads": {0: (0, 0)}}, "`draft_heads` must name each head once"),
        ({"draft_share": "0.5"}, "`draft_share` must be between 0 and 1, got '0.5'"),
        ({"draft_share": True}, "`draft_share` must be between 0 and 1, got True"),
        ({"metadata": None}, "`metadata` must be a dict"),
    ],
)
def test_fields_of_other_types(fields, message):
    with pytest.raises(ValueError, match=message):
        DustinProfile(**{"target_heads": {0: (0,)}, "draft_heads": {0: (0,)}, **fields})


def test_what_is_no_place_of_a_profile():
    for name in ("study/", "no/such/folder/x", "../up"):
        with pytest.raises(FileNotFoundError, match=f"`profile` {name} does not exist, and is no Hub id"):
            DustinProfile.from_pretrained(name)


@pytest.mark.parametrize("factory, message", [(None, "`factory` must be callable"), (lambda context: 3, "got int")])
def test_factories_that_make_no_policy(factory, message):
    with pytest.raises(ValueError, match=message):
        try:
            register_policy("no-policy", factory)
            dustin(tiny_model(), tiny_model(), [[5, 6, 7]], config={"mode": "no-policy"})
        finally:
            unregister_policy("no-policy")


def test_keys_of_any_type_are_named():
    with pytest.raises(ValueError, match=r"unknown keys \['1', 'a'\]"):
        DustinConfig.from_cache_config({1: 2, "a": 3})


def test_nothing_is_said_of_estimates_that_nobody_makes(monkeypatch):
    said = []
    monkeypatch.setattr("dustin_hf.assembly.logger.warning_once", said.append)
    for mode, count in (("full", 0), ("hybrid", 1)):
        dustin(tiny_model(), tiny_model(), [[5, 6, 7]], config={"mode": mode}, new=3)
        assert len(said) == count


@pytest.mark.parametrize("protected", [{"window": 10**8}, {"sinks": 10**8}, {"sinks": 5, "window": 10**8}])
def test_more_protected_tokens_than_there_are_slots(protected):
    target, prompts = tiny_model(), random_prompts([9, 40])
    rows, _ = dustin(target, tiny_model(seed=1), prompts, budget=10**9, config=protected, new=8, eos_token_id=None)
    assert rows == [plain(target, prompt, new=8, eos_token_id=None) for prompt in prompts]


def test_the_example_of_a_policy():
    """As `register_policy` shows it."""
    code = register_policy.__doc__.split("last:")[1].split("    Args:")[0]
    names = {"SelectionPolicy": SelectionPolicy, "Selection": Selection, "register_policy": register_policy}
    try:
        exec(textwrap.dedent(code), {**names, "torch": torch})
        target, prompts = tiny_model(), random_prompts([9, 40])
        for budget, exact in ((32, False), (64, True)):
            rows, _ = dustin(target, tiny_model(seed=1), prompts, budget=budget, config={"mode": "recent"}, new=12)
            expected = [plain(target, prompt, new=12) for prompt in prompts]
            same = [row[: len(tokens)] == tokens for row, tokens in zip(rows, expected)]
            assert same[0] and (same[1] or not exact)
    finally:
        unregister_policy("recent")
