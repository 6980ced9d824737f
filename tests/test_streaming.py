"""Streamers: one row as in stock, and batches."""

import threading

import pytest
import torch
from helpers import dustin, plain
from test_outputs import Characters
from transformers import TextIteratorStreamer, TextStreamer

import dustin_hf
from dustin_hf import BatchStreamer, BatchTextStreamer
from dustin_hf.testing import left_pad, random_prompts

PROMPTS = random_prompts([12, 30, 5])


class Recorder(BatchStreamer):
    def __init__(self):
        self.prompts, self.steps, self.ends = [], [], 0

    def put(self, value):
        self.prompts.append(value.tolist())

    def put_rows(self, rows):
        self.steps.append(rows)

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_batches_are_streamed_row_by_row(pair, kind):
    recorder = Recorder()
    end = plain(pair.target, PROMPTS[0], eos_token_id=None)[7]
    rows, out = dustin(pair.target, pair.drafts[kind], PROMPTS, streamer=recorder, eos_token_id=end, pad_token_id=0)
    assert recorder.prompts == [left_pad(PROMPTS)["input_ids"].tolist()] and recorder.ends == 1
    for row, (final, n) in enumerate(zip(rows, out.stats.new_tokens)):
        assert [token for step in recorder.steps for token in step[row]] == final[:n]
        assert [len(step[row]) for step in recorder.steps if step[row]] == out.stats.committed[row]


def test_text_of_batches(pair):
    texts = ["", "", ""]
    tokenizer = Characters()

    def on_text(row, piece):
        assert piece
        texts[row] += piece

    rows, out = dustin(pair.target, pair.M, PROMPTS, streamer=BatchTextStreamer(tokenizer, on_text))
    assert texts == [tokenizer.decode(row[:n]) for row, n in zip(rows, out.stats.new_tokens)]


def call(pair, streamer):
    with dustin_hf.enable(pair.target):
        return pair.target.generate(
            input_ids=torch.tensor([PROMPTS[0]]),
            assistant_model=pair.M,
            cache_implementation="dustin",
            streamer=streamer,
            max_new_tokens=20,
            do_sample=False,
        )


def test_text_streamer_p16(pair, capsys):
    tokenizer = Characters()
    out = call(pair, TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0, len(PROMPTS[0]) :]).strip()


def test_text_iterator_streamer(pair):
    tokenizer, result = Characters(), []
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=lambda: result.append(call(pair, streamer)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(result[0][0, len(PROMPTS[0]) :])


def test_a_streamer_of_one_row_is_refused_a_batch(pair):
    class Own:
        def put(self, value):
            pass

        def end(self):
            pass

    with pytest.raises(ValueError, match="a Own takes one row, `input_ids` have 3: .*BatchStreamer"):
        dustin(pair.target, pair.M, PROMPTS, streamer=Own())
    assert dustin(pair.target, pair.M, PROMPTS[:1], streamer=Own())[0] == [plain(pair.target, PROMPTS[0])]


def test_text_without_spaces_is_streamed_too():
    class Letters:
        def decode(self, tokens, **options):
            return "".join(map(chr, tokens))

    pieces = []
    streamer = BatchTextStreamer(Letters(), lambda row, text: pieces.append(text))
    streamer.put([[0]])
    for text in ("天气", "很好。a", "b\nfor(i", "=0;", "i<\t", "9"):
        streamer.put_rows([list(map(ord, text))])
    assert pieces == ["天气", "很好。", "ab\n", "for(i=0;i<\t"]
    streamer.end()
    assert pieces[-1] == "9" and len(pieces) == 5


def test_prompts_are_not_passed_on():
    with pytest.raises(ValueError, match="`skip_prompt=False` is not supported"):
        BatchTextStreamer(None, print, skip_prompt=False)
