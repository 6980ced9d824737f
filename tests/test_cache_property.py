"""A property test of DustinCache alone: appends, rollbacks, crops, reorders and selects against lists of lists."""

import copy
import os

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dustin_hf import DustinCache

LAYERS, HEADS, DIM = 2, 2, 3


def states(tokens, layer):
    """Keys and values of tokens `[..., L]`, different for each layer and head: `[..., HEADS, L, DIM]`."""
    base = torch.tensor(tokens, dtype=torch.float32)[..., None, :, None]
    offset = torch.arange(HEADS)[:, None, None] * 0.25 + layer * 0.5 + torch.arange(DIM) * 0.125
    return base + offset, -(base + offset)


class CacheAgainstLists(RuleBasedStateMachine):
    @initialize(rows=st.integers(1, 4), capacity=st.integers(6, 12))
    def start(self, rows, capacity):
        self.cache = DustinCache(LAYERS, rows, capacity)
        self.rows = [[] for _ in range(rows)]
        self.next = 1

    def fresh(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    @rule(length=st.integers(1, 4), data=st.data())
    def block(self, length, data):
        """A block in every row, of which each row keeps some tokens; the others stay behind as stale slots."""
        self.cache.grow(max(map(len, self.rows)) + length)
        block = [self.fresh(length) for _ in self.rows]
        with self.cache.writing_block(self.cache.lengths):
            for layer in range(LAYERS):
                keys, values = self.cache.update(*states(block, layer), layer)
                assert keys.shape == values.shape == (len(self.rows), HEADS, self.cache.capacity, DIM)
        kept = data.draw(st.lists(st.integers(0, length), min_size=len(self.rows), max_size=len(self.rows)))
        self.cache.lengths = self.cache.lengths + torch.tensor(kept)
        self.rows = [row + new[:n] for row, new, n in zip(self.rows, block, kept)]

    @rule(data=st.data(), length=st.integers(1, 5))
    def prefill(self, data, length):
        """Neighbouring rows of equal length go on by themselves."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        start = len(self.rows[row])
        end = row + 1
        while end < len(self.rows) and len(self.rows[end]) == start:
            end += 1
        self.cache.grow(start + length)
        new = [self.fresh(length) for _ in range(row, end)]
        with self.cache.writing_rows(slice(row, end), start):
            assert self.cache.get_seq_length() == start and self.cache.get_mask_sizes(length, 0) == (start + length, 0)
            for layer in range(LAYERS):
                keys, _ = self.cache.update(*states(new, layer), layer)
                assert keys.shape == (end - row, HEADS, start + length, DIM)
        lengths = self.cache.lengths.clone()
        lengths[row:end] += length
        self.cache.lengths = lengths
        self.rows[row:end] = [old + more for old, more in zip(self.rows[row:end], new)]

    @rule(count=st.integers(0, 5))
    def crop(self, count):
        self.cache.crop(-count)
        self.rows = [row[: max(0, len(row) - count)] for row in self.rows]

    @rule(data=st.data())
    def select(self, data):
        indices = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=5))
        self.cache.batch_select_indices(torch.tensor(indices))
        self.rows = [list(self.rows[i]) for i in indices]

    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.permutations(range(len(self.rows))))
        self.cache.reorder_cache(torch.tensor(order))
        self.rows = [self.rows[i] for i in order]

    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        if len(self.rows) * repeats <= 6:
            self.cache.batch_repeat_interleave(repeats)
            self.rows = [list(row) for row in self.rows for _ in range(repeats)]

    @rule(data=st.data())
    def copy_prefix(self, data):
        """What a row shares with its neighbour is copied, not computed."""
        if len(self.rows) > 1:
            row = data.draw(st.integers(1, len(self.rows) - 1))
            source, target = self.rows[row - 1], self.rows[row]
            if len(source) > len(target):
                self.cache.copy_slots(row - 1, row, len(target), len(source))
                lengths = self.cache.lengths.clone()
                lengths[row] = len(source)
                self.cache.lengths = lengths
                self.rows[row] = target + source[len(target) :]

    @rule(more=st.integers(0, 6))
    def grow(self, more):
        self.cache.grow(self.cache.capacity + more)

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = [[] for _ in self.rows]

    @rule()
    def deepcopy(self):
        """Go on with a copy, and spoil the original."""
        original = self.cache
        self.cache = copy.deepcopy(original)
        for layer in original.layers:
            if layer.is_initialized:
                layer.keys.fill_(float("nan"))
        original.lengths.fill_(0)

    @invariant()
    def holds_the_rows(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert self.cache.batch_size == len(self.rows)
        assert self.cache.lengths.tolist() == list(map(len, self.rows))
        assert self.cache.get_seq_length() == max(map(len, self.rows))
        for i, layer in enumerate(self.cache.layers):
            for b, row in enumerate(self.rows):
                if row:
                    k, v = states(row, i)
                    assert torch.equal(layer.keys[b, :, : len(row)], k)
                    assert torch.equal(layer.values[b, :, : len(row)], v)


TestCacheAgainstLists = CacheAgainstLists.TestCase
TestCacheAgainstLists.settings = settings(
    max_examples=int(os.environ.get("DUSTIN_EXAMPLES", "500")) // 5, stateful_step_count=30, deadline=None
)
