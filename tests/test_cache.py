"""DustinCache: contracts of the host, ragged writes, memory, and what drafting leaves behind."""

import gc
import weakref

import pytest
import torch
from helpers import dustin

import dustin_hf
from dustin_hf import DustinCache
from dustin_hf._compat import CACHE_ARG
from dustin_hf.testing import left_pad, random_prompts


def filled(lengths=(5, 9, 2), capacity=12, layers=2, heads=2, dim=4):
    """A cache whose rows hold random keys and values, and those as lists."""
    torch.manual_seed(0)
    cache = DustinCache(layers, len(lengths), capacity)
    k, v = torch.randn(2, layers, len(lengths), heads, max(lengths), dim)
    for layer in range(layers):
        with cache.writing_block(torch.zeros(len(lengths), dtype=torch.long)):
            cache.update(k[layer], v[layer], layer)
    cache.lengths = torch.tensor(lengths)
    cache.check_integrity()
    return cache, k, v


@pytest.mark.parametrize("remove, lengths", [(0, [5, 9, 2]), (-3, [2, 6, 0]), (-1000, [0, 0, 0])])
def test_crop_p30(remove, lengths):
    cache, _, _ = filled()
    cache.crop(remove)
    assert cache.lengths.tolist() == lengths and cache.get_seq_length() == max(lengths)
    cache.check_integrity()


def test_crop_refuses_a_positive_number_p30():
    cache, _, _ = filled()
    with pytest.raises(ValueError, match="as a negative integer, got 4"):
        cache.crop(4)
    assert cache.lengths.tolist() == [5, 9, 2]


def test_no_stale_token_survives_a_crop_p30():
    cache, k, v = filled()
    cache.crop(-1)
    new = torch.randn(3, 2, 2, 4)
    with cache.writing_block(cache.lengths):
        keys, _ = cache.update(new, new, 1)
    for row, length in enumerate([4, 8, 1]):
        assert torch.equal(keys[row, :, :length], k[1][row, :, :length])
        assert torch.equal(keys[row, :, length : length + 2], new[row])


def test_negative_slots_are_skipped():
    cache, k, _ = filled()
    new = torch.randn(3, 2, 2, 4)
    with cache.writing_block(torch.tensor([-1, 3, -2])):
        keys, _ = cache.update(new, new, 0)
    assert torch.equal(keys[0, :, 0], new[0, :, 1]) and torch.equal(keys[0, :, 1:5], k[0][0, :, 1:5])
    assert torch.equal(keys[1, :, 3:5], new[1]) and torch.equal(keys[2, :, :2], k[0][2, :, :2])


def test_rows_are_chosen_and_repeated():
    cache, k, _ = filled()
    cache.batch_repeat_interleave(2)
    assert cache.lengths.tolist() == [5, 5, 9, 9, 2, 2]
    cache.reorder_cache(torch.tensor([4, 0, 3]))
    assert cache.lengths.tolist() == [2, 5, 9] and cache.batch_size == 3
    assert torch.equal(cache.layers[1].keys[2, :, :9], k[1][1, :, :9])
    cache.check_integrity()
    cache.reset()
    assert cache.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("spoil", ["length", "nan", "shape", "cursor"])
def test_integrity_check_can_fail(spoil):
    cache, _, _ = filled()
    if spoil == "length":
        cache.lengths = torch.tensor([5, 13, 2])
    elif spoil == "nan":
        cache.layers[1].values[1, 0, 8, 0] = float("nan")
    elif spoil == "shape":
        cache.layers[0].keys = cache.layers[0].keys[:2]
    else:
        cache._shared.start = cache.lengths
    with pytest.raises(RuntimeError):
        cache.check_integrity()


def test_stale_values_do_not_count():
    cache, _, _ = filled()
    cache.layers[1].values[1, 0, 9, 0] = float("nan")  # beyond the row's length
    cache.check_integrity()


def test_a_plain_forward_is_refused(pair):
    """Stock decoding would misplace ragged rows; it is told so."""
    cache, _, _ = filled()
    with pytest.raises(RuntimeError, match="only inside generate"):
        pair.target(input_ids=torch.tensor([[5]] * 3), **{CACHE_ARG: cache})


def test_capacity_is_the_hosts_maximum():
    cache, _, _ = filled()
    assert cache.get_max_length() == 12 and cache.layers[0].get_max_length() == 12
    assert cache.get_mask_sizes(3, 0) == (12, 0)


def test_storage_is_per_kv_head_p41(pairs, family):
    pair = pairs(family, num_attention_heads=14, num_key_value_heads=2, head_dim=8, hidden_size=112)
    prompts = random_prompts([20, 7])
    _, out = dustin(pair.target, pair.M, prompts, new=10, gamma=3)
    cache = out[CACHE_ARG]
    assert cache.layers[0].keys.shape == (2, 2, cache.capacity, 8)
    assert cache.capacity == 20 + 10 + 3 + 1
    assert cache.nbytes == 2 * 2 * 2 * 2 * cache.capacity * 8 * 4
    assert out.stats.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 4])
def test_whole_blocks_are_accepted_p35(pair, gamma, batch):
    """P-35: the token of a block accepted whole that the draft never saw costs nothing in the next step."""
    prompts = random_prompts([9, 30, 4, 60][:batch])
    _, out = dustin(pair.target, pair.S, prompts, gamma=gamma, new=50, eos_token_id=None)
    for row in out.stats.committed:
        assert set(row[:-1]) == {gamma + 1}
    assert out[CACHE_ARG].lengths.tolist() == [len(p) + 50 - 1 for p in prompts]


def test_own_draft_cache_gets_the_missing_token(pair, monkeypatch):
    """P-35: the first draft forward of a step takes the last two committed tokens, the others one."""
    widths = []
    hook = pair.S.register_forward_hook(
        lambda m, a, kw, out: widths.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    dustin(pair.target, pair.S, random_prompts([9]), gamma=3, new=8, eos_token_id=None)
    hook.remove()
    assert widths == [(1, 2), (1, 1), (1, 1)] * 2


@pytest.mark.parametrize("returned", [False, True])
def test_nothing_holds_the_cache_p33(pair, returned, monkeypatch):
    made = []
    create = DustinCache.__init__

    def spy(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(DustinCache, "__init__", spy)
    for _ in range(5):
        _, out = dustin(pair.target, pair.M, random_prompts([9, 4]), new=6)
        if returned:
            assert made[0]() is out[CACHE_ARG]
        del out
        gc.collect()
        assert made and all(ref() is None for ref in made)
        made.clear()


def test_nothing_holds_the_cache_after_an_exception_p33(pair, monkeypatch):
    made = []
    create = DustinCache.__init__

    def spy(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(weakref.ref(self))

    def broken(input_ids, scores):
        raise RuntimeError("broken processor")

    monkeypatch.setattr(DustinCache, "__init__", spy)
    with dustin_hf.enable(pair.target), pytest.raises(RuntimeError, match="broken processor"):
        pair.target.generate(
            **left_pad(random_prompts([9, 4])),
            assistant_model=pair.M,
            cache_implementation="dustin",
            logits_processor=[broken],
            max_new_tokens=6,
        )
    gc.collect()
    assert made and all(ref() is None for ref in made)
