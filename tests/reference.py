"""Dustin for one row, literally: no cache, dense attention under explicit masks, equations 5 and 6 as they stand.

Every committed token keeps the set of positions its verification attended to. One dense forward over the whole text
under the mask made of those sets gives the same keys and values as any cache would, since each depends only on the
token's own row of the mask and on earlier tokens. Slow on purpose, and shares no code with the library.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class Reference:
    target: object
    draft: object
    k: int
    sinks: int
    window: int
    m: int
    target_heads: dict
    draft_heads: dict
    gamma: int
    sparse: bool = False  # whether the draft attends to its own choice of the step before, and to what came after it
    sets: list = field(default_factory=list)  # the selected positions of each step, None for the dense first one

    def generate(self, prompt, new):
        shared = self.draft is self.target
        text = list(prompt)
        rows = [set(range(i + 1)) for i in range(len(prompt))]  # the mask: what each position attends to
        self.draft_rows = [set(range(i + 1)) for i in range(len(prompt) - 1)]
        self.view = None  # the draft's choice, and how many tokens there were then
        history = None  # position and mask row of the last token the target has processed
        end = len(prompt) + new
        while len(text) < end:
            committed = len(text) - 1  # the last token is in no cache yet
            gamma = min(self.gamma, end - len(text) - 1)
            drafts = []
            for i in range(gamma):
                drafts.append(self.next_draft(text + drafts, rows, committed, i, shared))
            s_draft = [0.0] * committed
            if gamma and (history is not None or self.sparse):
                masks = self.draft_masks(rows, committed, gamma, shared)
                for i in range(gamma):
                    a = self.attention(
                        self.draft, text + drafts[:-1], masks, self.draft_heads, committed + i, committed
                    )
                    s_draft = [x + y for x, y in zip(s_draft, a)]
                self.draft_rows = masks
                k = max(self.sinks + self.window + 1, self.k - 2 * self.gamma)
                self.view = set(self.choose(s_draft, s_draft, committed, 0, k)), committed
            if history is None:
                chosen = None
                seen = set(range(committed))
            else:
                s_target = self.attention(self.target, text[:-1], rows, self.target_heads, history, committed)
                chosen = self.choose(s_draft, s_target, committed, self.m if gamma else 0)
                seen = set(chosen)
            self.sets.append(chosen)
            block_rows = [seen | set(range(committed, committed + i + 1)) for i in range(gamma + 1)]
            logits = self.logits(self.target, text + drafts, rows[:committed] + block_rows)
            best = logits[committed:].argmax(-1).tolist()
            kept = 0
            while kept < gamma and drafts[kept] == best[kept]:
                kept += 1
            text += best[: kept + 1]
            rows = rows[:committed] + block_rows[: kept + 1]
            history = len(rows) - 1
        return text[len(prompt) :]

    def draft_masks(self, rows, committed, count, shared):
        """Mask rows of the draft's forward over the committed tokens and `count` block inputs."""
        if self.sparse:
            # an own cache computes the last committed token again, under the new choice
            first = committed if shared else max(0, committed - 1)
            slots, since = self.view or (set(), 0)
            own = [slots | set(range(since, position + 1)) for position in range(first, committed + count)]
            return (rows if shared else self.draft_rows)[:first] + own
        if not shared:
            return [set(range(i + 1)) for i in range(committed + count)]
        own = []
        for position in range(committed, committed + count):
            recent = range(max(0, position - (self.k - self.sinks)), position)
            own.append(set(range(min(self.sinks, position))) | set(recent) | {position})
        return rows[:committed] + own

    def next_draft(self, text, rows, committed, i, shared):
        masks = self.draft_masks(rows, committed, i + 1, shared)
        return self.logits(self.draft, text, masks)[-1].argmax(-1).item()

    def choose(self, s_draft, s_target, n, m, k=None):
        """Equation 6."""
        k = self.k if k is None else k
        protected = {i for i in range(n) if i < self.sinks or i >= n - self.window}
        rest = sorted(set(range(n)) - protected, key=lambda i: (-s_draft[i], i))
        by_draft = set(rest[: min(m, k - len(protected))])
        rest = sorted(set(range(n)) - protected - by_draft, key=lambda i: (-s_target[i], i))
        by_target = set(rest[: k - len(protected) - len(by_draft)])
        return sorted(protected | by_draft | by_target)

    def attention(self, model, text, masks, heads, query, n):
        """Equation 5 for one query: softmax over the first n positions, summed over the chosen heads."""
        inputs = {}
        hooks = [
            model.model.layers[layer].self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, layer=layer: inputs.__setitem__(layer, kwargs), with_kwargs=True
            )
            for layer in heads
        ]
        self.logits(model, text, masks)
        for hook in hooks:
            hook.remove()
        total = torch.zeros(n)
        for layer, chosen in heads.items():
            attn = model.model.layers[layer].self_attn
            hidden = inputs[layer]["hidden_states"]
            cos, sin = inputs[layer]["position_embeddings"]
            q, k = (
                rotate(proj(hidden)[0].view(len(text), -1, attn.head_dim), cos[0], sin[0])
                for proj in (attn.q_proj, attn.k_proj)
            )
            group = q.shape[1] // k.shape[1]
            for head in chosen:
                scores = (k[:n, head // group] @ q[query, head]) / attn.head_dim**0.5
                total += scores.softmax(-1)
        return total.tolist()

    @staticmethod
    def logits(model, text, masks):
        """Stock forward without a cache under a dense mask; `[len(text), V]`."""
        allowed = torch.zeros(len(text), len(text), dtype=torch.bool)
        for i, row in enumerate(masks[: len(text)]):
            allowed[i, sorted(row)] = True
        mask = torch.zeros(len(text), len(text)).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            return model(input_ids=torch.tensor([text]), attention_mask=mask[None, None], use_cache=False).logits[0]


def rotate(x, cos, sin):
    """Rotary embedding of `x [T, heads, D]`."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]
