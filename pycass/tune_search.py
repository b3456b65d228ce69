"""What `pycass tune` tries next: a list, its best members together, and then what optuna suggests, if it is there."""

from collections.abc import Callable, Iterator, Sequence

ASKS = 20  # suggestions in a row that were known already, before the search ends


def has_optuna() -> bool:
    """Whether optuna can be imported."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        return False
    return True


class Search:
    """Proposes points of a space {parameter: its values}. A point is a dictionary with a value of every parameter;
    `unify` maps points that mean the same to one key. Iterate, and tell() the worth of each point before the next."""

    def __init__(self, space: dict[str, Sequence], first: Sequence[dict], unify: Callable, optuna: bool, seed: int = 1):
        self._space, self._first, self._unify = space, list(first), unify
        self._optuna, self._seed = optuna, seed
        self._worth: dict = {}  # key: worth
        self._told: list[tuple[dict, float]] = []

    def tell(self, point: dict, worth: float) -> None:
        """What a point turned out to be worth: more is better."""
        self._worth[self._unify(point)] = worth
        self._told.append((point, worth))

    def __iter__(self) -> Iterator[dict]:
        for point in self._first:
            if self._unify(point) not in self._worth:
                yield point
        yield from self._suggestions() if self._optuna else self._unions()

    def _unions(self) -> Iterator[dict]:
        """Without optuna: to the best point so far, what the next best ones set otherwise than the first point does,
        one after the other, as long as that gains."""
        if not self._told:
            return
        base, ranked = self._told[0][0], sorted(self._told, key=lambda t: -t[1])
        best, worth = ranked[0]
        for other, _ in ranked[1:]:
            changes = {k: v for k, v in other.items() if v != base[k]}
            point = best | changes
            if not changes or self._unify(point) in self._worth:
                continue
            yield point
            if self._worth[self._unify(point)] > worth:
                best, worth = point, self._worth[self._unify(point)]

    def _suggestions(self) -> Iterator[dict]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kinds = {k: optuna.distributions.CategoricalDistribution(list(v)) for k, v in self._space.items()}
        sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=5)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for point, worth in self._told:
            study.add_trial(optuna.trial.create_trial(params=point, distributions=kinds, value=worth))
        known = 0
        while known < ASKS:
            trial = study.ask(kinds)
            key = self._unify(trial.params)
            if key in self._worth:
                known += 1
            else:
                known = 0
                yield dict(trial.params)
            study.tell(trial, self._worth[key])
