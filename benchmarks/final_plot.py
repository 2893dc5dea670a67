"""A stored final as a picture: each finalist's windows over the rounds, and what each look said.

    tunekit sweep SPEC --db final.db ...
    python benchmarks/final_plot.py final.db final.svg [--problem K=V ...]

Above: microseconds a call and the SM clock, so that drift and throttling show. Below: by how much each
finalist was slower than the leader at each look, with its interval; a line marks the decision.
Needs matplotlib (``pip install --group bench``).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

from tunekit.measure.record import decide_again
from tunekit.measure.sequential import judge, looks, margin_against
from tunekit.model import Winner
from tunekit.store.database import read_records
from tunekit.trials import Outcome, Trial

MOST_BEHIND = 0.10  # what is further behind leaves the picture


def stored_final(database: Path, problem: dict[str, str]) -> tuple[Winner, list[Trial]]:
    """The newest winner with a final, of a problem that has the given values, and that final's trials."""
    records = read_records(database)
    for winner in reversed(records.winners):
        if winner.final and all(str(winner.problem.get(name)) == value for name, value in problem.items()):
            return winner, [t for t in records.trials if t.outcome.facts.get("final") == winner.final and t.outcome.ok]
    raise SystemExit(f"{database} has no winner with a final for {problem or 'any problem'}")


def windows_of(outcome: Outcome) -> list[tuple[int, float]]:
    """(round, us) of the windows that counted."""
    return [(int(w["round"]), float(w["us"])) for w in outcome.windows if w.get("kept")]


def draw(winner: Winner, trials: list[Trial], out: Path) -> None:
    finalists = {trial.variant.id: trial.outcome for trial in trials}
    decision = decide_again(finalists)
    samples = {id: outcome.samples_us for id, outcome in finalists.items()}
    margin = float(trials[0].outcome.facts["final_margin"])
    confidence = float(trials[0].outcome.facts["final_confidence"])
    ranked = sorted(finalists, key=lambda id: decision.standings[id].behind)
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 8), height_ratios=(3, 2), layout="constrained")
    colours: dict[str, Any] = {}
    for id in ranked:
        if decision.standings[id].behind <= MOST_BEHIND:
            rounds, times = zip(*windows_of(finalists[id]), strict=True)
            (line,) = above.plot(
                rounds, times, marker=".", linewidth=0.8, label=f"{id} ({decision.standings[id].verdict})"
            )
            colours[id] = line.get_color()
    clocks = [(int(w["round"]), int(w["sm_mhz"])) for o in finalists.values() for w in o.windows if "sm_mhz" in w]
    if clocks:
        other = above.twinx()
        other.scatter(*zip(*clocks, strict=True), s=4, color="0.7", zorder=0)
        other.set_ylabel("SM clock (MHz, grey)")
    shown = sorted(us for id in colours for _, us in windows_of(finalists[id]))
    above.set_ylim(0.99 * shown[0], 1.02 * shown[int(0.99 * (len(shown) - 1))])  # single wild windows leave the picture
    above.set_ylabel("us a call")
    above.set_xlabel("round")
    above.legend(fontsize=7)
    where = winner.environment.gpu or "this machine"
    above.set_title(
        f"{winner.variant.spec} on {where}: {decision.outcome} after {decision.rounds} rounds\n{winner.protocol}"
    )
    for number, rounds in enumerate(looks(decision.rounds)):
        judged = judge({id: taken[:rounds] for id, taken in samples.items()}, margin=margin, confidence=confidence)
        for place, id in enumerate(id for id in ranked if id in colours):
            compared = judged.comparisons[id]
            if compared.rounds != rounds or compared.verdict == "leader":
                continue
            at = number + 0.05 * place
            below.plot([at, at], [100 * compared.low, 100 * compared.high], color=colours[id])
            below.plot(at, 100 * compared.behind, marker="o", markersize=4, color=colours[id])
    below.axhline(0, color="0.5", linewidth=0.8)
    least = 100 * margin_against(samples[ranked[0]], margin)
    below.axhspan(-least, least, color="0.92", label=f"within the margin of {least:.2g} %")
    below.axvline(len(looks(decision.rounds)) - 1.05, color="0.3", linestyle=":", label=decision.outcome)
    below.set_xticks(range(len(looks(decision.rounds))), [str(rounds) for rounds in looks(decision.rounds)])
    below.set_xlabel("rounds at the look")
    below.set_ylabel("slower than the leader (%)")
    below.legend(fontsize=7)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problem", nargs="*", default=[], metavar="K=V")
    arguments = parser.parse_args()
    problem = dict(text.split("=", 1) for text in arguments.problem)
    draw(*stored_final(arguments.database, problem), arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
