"""Algorithm 1 of the paper over recorded traces: target layers, draft layers, and the split of every budget."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dustin_hf.held import write_file
from dustin_hf.profiling.recovery import Objective, Prepared, Sample
from dustin_hf.profiling.traces import Progress, TraceSet

STATE_NAME = "search.json"
STORAGE_NAME = "optuna.db"
LOOKS = 8  # of the pruner at a trial


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What is searched.

    Args:
        budgets: k; each gets an m of its own. Layers are chosen by the mean over all of them.
        search_shares: m / k while layers are chosen: B_search of Algorithm 1. The paper's 128, 192 and 256 tokens are
            these shares of its k = 512.
        target_layers: most target candidates. The paper takes one.
        draft_layers: most draft candidates (N_draft).
        min_gain: a further candidate is taken only where it raises ARR by more than this.
        sinks, window: protected tokens, counted in k.
        trials: tried values of m per budget, pruned ones included.
        seed: of Optuna's sampler.
        target, draft: candidates to choose from, by their place in the traces. Default: all.
    """

    budgets: tuple[int, ...] = (128, 256, 512)
    search_shares: tuple[float, ...] = (0.25, 0.375, 0.5)
    target_layers: int = 1
    draft_layers: int = 3
    min_gain: float = 0.0
    sinks: int = 4
    window: int = 16
    trials: int = 40
    seed: int = 0
    target: tuple[int, ...] | None = None
    draft: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.budgets or min(self.budgets) <= self.sinks + self.window:
            raise ValueError(
                f"`budgets` must each be above sinks + window = {self.sinks + self.window}, got {self.budgets}"
            )
        if not self.search_shares or not all(0 < share <= 1 for share in self.search_shares):
            raise ValueError(f"`search_shares` must be above 0 and at most 1, got {self.search_shares}")
        for name in ("target_layers", "draft_layers", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")

    def most(self, budget: int) -> int:
        """The largest m that has an effect."""
        return budget - self.sinks - self.window


@dataclass(slots=True)
class SearchResult:
    """What was found.

    Args:
        target, draft: chosen candidates, by their place in the traces, in the order of choice.
        splits: m of each budget.
        arr: ARR reached with each budget on the samples of the search, the window's own tokens included.
        rounds: of each greedy round: which model, ARR with each candidate added, which was taken (None: none helped).
    """

    target: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    splits: dict[int, int] = field(default_factory=dict)
    arr: dict[int, float] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)


def search(
    traces: TraceSet,
    folder: str | Path,
    settings: SearchSettings,
    numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    layers: Sequence[int] | None = None,
) -> SearchResult:
    """Algorithm 1. An interrupted search goes on from the last finished round or trial, and ends the same.

    Args:
        traces: recorded.
        folder: of the study: keeps the rounds, and Optuna's storage with one study for each budget.
        settings: what to search.
        numbers: samples to search on. Default: all.
        device: where sets are chosen.
        progress: called with the phase, and how much of it is done.
        layers: target layers whose attention counts. Default: all.

    Raises:
        ValueError: if the folder holds another search, or the texts are too short for there to be a choice.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = list(range(len(traces)) if numbers is None else numbers)
    objective = Objective(traces, numbers, settings.sinks, settings.window, device, layers)
    if objective.longest <= max(settings.budgets):
        raise ValueError(
            f"the longest context has {objective.longest} tokens, so a budget of {max(settings.budgets)} keeps all "
            "of them and there is nothing to choose: take longer texts or smaller `budgets`"
        )
    about = {"settings": asdict(settings), "traces": _digest(traces.index), "numbers": numbers}
    about |= {} if layers is None else {"layers": list(layers)}
    state = _State(folder / STATE_NAME, json.loads(json.dumps(about)))
    result = SearchResult()
    for model, most in (("target", settings.target_layers), ("draft", settings.draft_layers)):
        found = _greedy(model, most, result, traces, settings, objective, state, progress)
        result.target, result.draft = (found, ()) if model == "target" else (result.target, found)
    signals = _Signals(objective, result.target, result.draft)
    with _storage(folder / STORAGE_NAME) as storage:
        for budget in settings.budgets:
            result.splits[budget], result.arr[budget] = _tune(budget, signals, settings, storage, progress)
    result.rounds = list(state.content["rounds"].values())
    return result


def _greedy(
    model: str,
    most: int,
    result: SearchResult,
    traces: TraceSet,
    settings: SearchSettings,
    objective: Objective,
    state: "_State",
    progress: Progress | None,
) -> tuple[int, ...]:
    """Phases 1 and 2: candidates of one model, each the best to add to those before it."""
    all_of_them = getattr(traces.settings, model)
    open_ones = getattr(settings, model)
    open_ones = range(len(all_of_them)) if open_ones is None else open_ones
    chosen: list[int] = []
    best = float("-inf")
    for number in range(most):
        layers = {all_of_them[i][0] for i in chosen}
        left = [i for i in open_ones if all_of_them[i][0] not in layers]
        if not left:
            break

        def measure(left: list[int] = left, best: float = best) -> dict[str, Any]:
            scores = _round(model, chosen, left, result.target, settings, objective, progress)
            top = max(left, key=lambda i: (scores[i], -i))
            taken = top if scores[top] > best + (settings.min_gain if chosen else 0) else None
            return {"model": model, "arr": {str(i): scores[i] for i in left}, "taken": taken}

        found = state.round(f"{model} {number}", measure)
        if found["taken"] is None:
            break
        chosen.append(found["taken"])
        best = found["arr"][str(found["taken"])]
    return tuple(chosen)


def _round(
    model: str,
    chosen: list[int],
    left: list[int],
    target: tuple[int, ...],
    settings: SearchSettings,
    objective: Objective,
    progress: Progress | None,
) -> dict[int, float]:
    """ARR with each of the open candidates added to the chosen ones."""
    splits: dict[int, list[int]] = {k: [0] for k in settings.budgets}
    if model == "draft":
        splits = {k: [min(round(x * k), settings.most(k)) for x in settings.search_shares] for k in settings.budgets}
    totals: dict[int, torch.Tensor | float] = dict.fromkeys(left, 0.0)
    for done, number in enumerate(objective.numbers):
        if progress is not None:
            progress(f"{model} layer {len(chosen) + 1}", done, len(objective.numbers))
        prepared = objective.prepared(number)
        sample = prepared.sample
        if model == "target":
            fixed = sample.history(chosen)
            for i in left:
                history = fixed + sample.history([i])
                totals[i] += prepared.mean_arr(history, history, splits)
        else:
            history, fixed = sample.history(target), sample.lookahead(chosen)
            for i in left:
                totals[i] += prepared.mean_arr(history, fixed + sample.lookahead([i]), splits)
    return {i: float(total) / len(objective.numbers) for i, total in totals.items()}


class _Signals:
    """Phase 3: history and lookahead of the chosen candidates, kept in memory, and ARR by k and m."""

    def __init__(self, objective: Objective, target: tuple[int, ...], draft: tuple[int, ...]):
        self.objective, self.target, self.draft = objective, target, draft
        self.held: dict[int, tuple[Prepared, torch.Tensor, torch.Tensor]] = {}
        self.known: dict[tuple[int, int], list[float]] = {}

    def running_means(self, k: int, m: int) -> Iterator[float]:
        """ARR over the first sample, the first two, and so on."""
        known = self.known.setdefault((k, m), [])  # samplers ask for a good m more than once
        for i, number in enumerate(self.objective.numbers):
            if i == len(known):
                prepared, history, lookahead = self._signals_of(number)
                known.append(prepared.arr(history, lookahead, k, m))
            yield sum(known[: i + 1]) / (i + 1)

    def _signals_of(self, number: int) -> tuple[Prepared, torch.Tensor, torch.Tensor]:
        if number not in self.held:
            full = self.objective.prepared(number)
            # without the candidates that were not chosen
            light = Sample(full.sample.settings, {"lengths": full.sample.lengths.clone()})
            prepared = Prepared(light, full.truth, full.new_mass, full.sinks, full.window)
            self.held[number] = prepared, full.sample.history(self.target), full.sample.lookahead(self.draft)
        return self.held[number]


def _tune(
    budget: int, signals: _Signals, settings: SearchSettings, storage: Any, progress: Progress | None
) -> tuple[int, float]:
    """Phase 3: m of one budget, and the ARR it reaches. Seeded by the number of finished trials, so it can go on."""
    import optuna

    states, most, count = optuna.trial.TrialState, settings.most(budget), len(signals.objective.numbers)
    looks = range(count // LOOKS, count, max(1, count // LOOKS))  # every look is a write to the storage
    space: dict[str, Any] = {"m": optuna.distributions.IntDistribution(0, most)}
    # neither signal alone, nor what fits most pairs (ours: 0.75 k), shall be better than what is found
    starts = list(dict.fromkeys([0, min(round(0.75 * budget), most), most]))
    study = optuna.create_study(
        storage=storage,
        study_name=f"budget {budget}",
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=count // 4),
    )
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)  # of a run that was interrupted
    while (done := len(study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))) < settings.trials:
        if progress is not None:
            progress(f"split of budget {budget}", done, settings.trials)
        if done < len(starts):
            means = list(signals.running_means(budget, starts[done]))
            study.add_trial(
                optuna.trial.create_trial(
                    params={"m": starts[done]},
                    distributions=space,
                    value=means[-1],
                    intermediate_values={step: means[step] for step in looks},
                )
            )
            continue
        study.sampler = optuna.samplers.TPESampler(seed=settings.seed + done)
        asked = study.ask(space)
        mean, pruned = 0.0, False
        for step, mean in enumerate(signals.running_means(budget, asked.params["m"])):
            if step not in looks:
                continue
            asked.report(mean, step)
            pruned = step + 1 < count and asked.should_prune()
            if pruned:
                break
        study.tell(asked, state=states.PRUNED if pruned else states.COMPLETE, values=None if pruned else mean)
    best = max(study.get_trials(states=(states.COMPLETE,)), key=lambda trial: (trial.value, -trial.params["m"]))
    assert best.value is not None
    return best.params["m"], best.value


@contextmanager
def _storage(path: Path) -> Iterator[Any]:
    """Optuna's storage in a file, quiet, and closed in the end."""
    import optuna
    from sqlalchemy import event  # which Optuna's storage is made with

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with ExitStack() as stack, _storage_errors(path):
        stack.callback(optuna.logging.set_verbosity, verbosity)
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")

        @event.listens_for(storage.engine, "connect")
        def _(connection: Any, record: Any) -> None:
            # an interrupted process loses nothing without it, and a disk may take 20 ms for each of a thousand writes
            connection.execute("PRAGMA synchronous = OFF")

        storage.engine.dispose()  # the connection that made the tables
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    from sqlalchemy.exc import DatabaseError, OperationalError

    try:
        yield
    except OperationalError as error:  # a full disk, above all
        raise RuntimeError(
            f"{path} cannot be written ({error.orig}): make room and give the command again, finished trials are kept"
        ) from OSError(str(error.orig))
    except DatabaseError as error:
        raise ValueError(f"{path} cannot be read ({error.orig}): remove it, its trials are made again") from error


class _State:
    """Finished greedy rounds, in a file that is written after each."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {"about": about, "rounds": {}}
        if path.is_file():
            try:
                self.content = json.loads(path.read_text())
                different = [name for name in about if self.content["about"].get(name) != about[name]]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} cannot be read ({error}): remove it, and the search begins anew") from error
            if different:
                raise ValueError(f"{path} is of a search with other {different}: use another folder, or remove it")

    def round(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The round of that name, measured if it has not been."""
        if name not in self.content["rounds"]:
            self.content["rounds"][name] = measure()
            write_file(self.path, json.dumps(self.content, indent=1).encode())
        return self.content["rounds"][name]


def _digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()[:16]


def brute_force(
    traces: TraceSet, settings: SearchSettings, numbers: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, int]]:
    """Every set of candidates with every m: best target candidates, draft candidates, and m of each budget.

    For tests: the cost grows with the binomials of the candidates. Equal ones by fewer candidates, then by number.
    """
    numbers = range(len(traces)) if numbers is None else numbers
    objective = Objective(traces, numbers, settings.sinks, settings.window)
    subsets: list[list[tuple[int, ...]]] = []
    for model, most in (("target", settings.target_layers), ("draft", settings.draft_layers)):
        open_ones = getattr(settings, model)
        open_ones = range(len(getattr(traces.settings, model))) if open_ones is None else open_ones
        subsets.append([one for size in range(1, most + 1) for one in itertools.combinations(open_ones, size)])
    best: tuple[float, Any] = (float("-inf"), None)
    for target, draft in itertools.product(*subsets):
        signals = _Signals(objective, target, draft)
        total, splits = 0.0, {}
        for budget in settings.budgets:
            reached = [list(signals.running_means(budget, m))[-1] for m in range(settings.most(budget) + 1)]
            splits[budget] = max(range(len(reached)), key=lambda m: (reached[m], -m))
            total += reached[splits[budget]]
        if total > best[0]:
            best = total, (target, draft, splits)
    return best[1]
