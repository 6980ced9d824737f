"""Generation tasks of lm-evaluation-harness (`lm_eval`) answered through Dustin.

```bash
pip install 'dustin_hf[lm-eval]'
python -m dustin_hf.eval.harness --model dustin --model_args pretrained=TARGET,draft=DRAFT,budget=512 \
    --tasks gsm8k --batch_size 8 --device cuda
```

This is lm_eval's own command line, with one more name for `--model`. Up to 0.4.13 lm_eval looks for no models but its
own, so there `lm_eval --model dustin` does not find this one. Its development branch reads entry points of the group
`lm_eval.models`, which this package declares; with a release that has it, either command will do.

`--model_args` takes, besides what `--model hf` does:

| option | meaning |
|---|---|
| `draft` | folder or Hub id of the drafting model; the same as `pretrained`: the target drafts for itself |
| `profile` | folder, file or Hub id of a `DustinProfile`; default: as `dustin_hf.enable` |
| `budget`, `mode`, `draft_cache`, `num_assistant_tokens`, ... | as in `cache_config`, all but `backend` |

`mode` may also name a baseline (`dustin_hf.eval.baselines`).

Sampling comes with the task or with `--gen_kwargs`, as ever: `--gen_kwargs do_sample=true,temperature=0.7`.

Only generation is Dustin's. Multiple choice and perplexity (`loglikelihood`) are the harness's own dense forward over
the full cache, whatever the budget: their scores say nothing about sparse verification.

The host looks for stop strings after every token, so on CUDA each forward is a graph of its own, not the whole step:
times of such runs are no measure of speed.
"""
