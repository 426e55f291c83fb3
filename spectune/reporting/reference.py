"""What the formulas say about published figures, as Markdown.

    python -m spectune.reporting.reference FOLDER -o FILE

FOLDER holds the tables; every number of the page is either copied from one of them or computed from it here.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from spectune.errors import SpectuneError
from spectune.reporting.methods import markdown
from spectune.speedup.published import (
    Table,
    choose_k,
    fastest_card,
    fit_line,
    missing_steps,
    read_table,
    study_curves,
    throughput_points,
)
from spectune.sweeping.atomic import write_atomically

_KS = range(1, 9)  # the article does not tell its K
_TARGET_B = 70.0  # parameters, in 10^9, as in the article
_DRAFT_B = 8.0
_EXPERTS = 8 / 128  # Qwen3-235B-A22B: experts active per token / in all, from its public configuration
# Llama 3.1 70B, from its public configuration: layers, key-value heads, head size, keys and values, two bytes each.
_KV_BYTES = 80 * 8 * 128 * 2 * 2


def curves(table: Table) -> str:
    studies = study_curves(table)
    rows = [
        [
            s.name,
            f"{s.usual.a:.3f}",
            f"{s.usual.g:.3f}",
            f"{s.usual.rmse:.3f}",
            f"{s.chosen.rmse:.3f} (p = {s.chosen.p})",
            f"{s.bound:.3f}",
            f"{s.geometric.alpha:.3f}",
            f"{s.geometric.rmse:.3f}",
            f"{s.constant.rate:.2f}",
            f"{s.constant.rmse:.2f}",
            "rejected" if s.constant.rejected else "not rejected",
        ]
        for s in studies
    ]
    head = ["curve", "a", "g", "RMSE, p = 1", "RMSE, chosen", "least possible", "α", "RMSE, i.i.d.", "β", "RMSE, β"]
    worst = max(studies, key=lambda s: s.usual.rmse)
    late = [s.name for s in studies if s.chosen.p == 2]
    return "\n\n".join(
        (
            "## Acceptance curves",
            f"Source: {table.source}. Lengths at K = 1 to 8 in tokens, bonus included; RMSE in tokens.",
            markdown([*head, "constant β"], rows),
            f"With p = 1 the worst error is {worst.usual.rmse:.4f} tokens ({worst.name}), the least that any a and g "
            f"reach there. No curve that grows with K by less and less comes below {worst.bound:.3f} there, since the "
            f"published lengths fall at the end. A chance that holds for a few positions and then falls, "
            f"p = 2, is chosen for: {', '.join(late) or 'none'}. With it the worst of all curves is "
            f"{max(s.chosen.rmse for s in studies):.3f}. A constant β misses by "
            f"{min(s.constant.rmse for s in studies):.2f} to {max(s.constant.rmse for s in studies):.2f} tokens.",
        )
    )


def throughput(table: Table) -> str:
    points = throughput_points(table)
    batches = sorted({p.batch for p in points})
    every, half = (choose_k(points, used, _EXPERTS) for used in (batches, batches[::2]))
    rows = [
        [
            str(a.batch),
            str(max((p for p in points if p.batch == a.batch), key=lambda p: p.tokens_per_second).k),
            str(a.k),
            f"{a.regret:.1%}",
            f"{a.error:.1%}",
            str(b.k),
            f"{b.regret:.1%}",
            "fitted" if b.fitted else "held out",
            f"{b.error:.1%}",
        ]
        for a, b in zip(every, half, strict=True)
    ]
    head = ["batch", "best K", "K, all columns", "lost", "largest error"]
    head += ["K, every other column", "lost", "this column", "largest error"]
    return "\n\n".join(
        (
            "## K from throughput alone",
            f"Source: {table.source}.",
            markdown(head, rows),
            "Rate = B·AL(K) / (fixed + draft·K + token·B(K+1) + experts·(1 − (1 − ρ)^{B(K+1)})), with ρ = 8/128 "
            "experts active a token. Without a baseline row the speedup is unknown, and AL and the round's time cannot "
            "be told apart; which K is fastest can.",
        )
    )


def draft_choice(table: Table) -> str:
    rows = []
    for row in table.rows:
        beta, speedup, cost = float(row["acceptance_rate"]), float(row["speedup"]), float(row["params_b"]) / _TARGET_B
        low, high = fastest_card(beta, cost, _KS)
        missing = [missing_steps(beta, speedup, cost, k) for k in _KS]
        rows.append(
            [
                row["draft"],
                row["acceptance_rate"],
                f"{cost:.3f}",
                f"{speedup:.1f}",
                f"{low:.2f} to {high:.2f}",
                f"{missing[2]:.1f}",
                f"{missing[4]:.1f}",
            ]
        )
    head = ["draft", "β", "T_d/T_t by size", "published speedup", "(1), K = 1 to 8"]
    head += ["missing steps, K = 3", "missing steps, K = 5"]
    by_card = [row[0] for row in sorted(rows, key=lambda row: -float(row[4].split()[-1]))]
    too_fast = [row[0] for row in rows if float(row[3]) < float(row[4].split()[0])]
    return "\n\n".join(
        (
            "## The article: choice of the draft",
            f"Source: {table.source}. (1) is (1 + βK)/(1 + K·T_d/T_t), with T_d/T_t taken as the ratio of the sizes.",
            markdown(head, rows),
            "* K is not published, so β cannot be compared with anything, and (1) gives a range.\n"
            f"* At K = 8, (1) ranks the drafts {', '.join(by_card)}; the article ranks them as the table does.\n"
            f"* No K ≥ 1 gives as little as was published for {', '.join(too_fast)}: since β > T_d/T_t, (1) promises a "
            "gain at every K. The published figures need the missing steps in each round, and more of them for the "
            "small drafts: those were not as fast as their size, or their rounds cost more.",
        )
    )


def batches(table: Table) -> str:
    sizes = [float(row["batch"]) for row in table.rows]
    steps = [size / float(row["no_spec"]) for size, row in zip(sizes, table.rows, strict=True)]
    slopes = [(t - s) / (b - a) * 1e3 for (a, s), (b, t) in pairwise(zip(sizes, steps, strict=True))]
    rows = []
    for row, size, step, slope in zip(table.rows, sizes, steps, [None, *slopes], strict=True):
        ratio = float(row["spec"]) / float(row["no_spec"])
        rows.append(
            [
                f"{size:.0f}",
                f"{step * 1e3:.1f}",
                "—" if slope is None else f"{slope:.1f}",
                row["speedup"],
                f"{ratio:.2f}",
                *(f"{(1 + 0.82 * k) / ratio:.1f}" for k in (3, 5)),
            ]
        )
    line = fit_line(sizes, steps)
    head = ["batch", "plain step, ms", "ms per added row", "published speedup", "spec / no_spec"]
    head += ["round in plain steps, K = 3", "K = 5"]
    return "\n\n".join(
        (
            "## The article: batch",
            f"Source: {table.source}. The plain step is batch / tokens/s. A round in plain steps is AL / speedup, with "
            "β = 0.82, the article's rate for this draft, at every batch.",
            markdown(head, rows),
            "* The speedups agree with the rates.\n"
            "* Formula (2) explains the fall by rounds that cost more plain steps at larger batches; (1), which knows "
            "no batch, cannot.\n"
            f"* The best line through the plain steps, {line.fixed * 1e3:.0f} ms + {line.slope * 1e3:.1f} ms·B, is up "
            f"to {line.worst:.0%} off. The added row costs {slopes[0]:.1f} ms first and {slopes[-1]:.1f} ms last, "
            "where reading the weights once for all rows would make the first rows the cheapest: the roofline is "
            "convex, these figures are not.",
        )
    )


def text_lengths(table: Table) -> str:
    contexts = [float(row["input_tokens"]) + float(row["output_tokens"]) / 2 for row in table.rows]
    steps = [1 / float(row["no_spec"]) for row in table.rows]
    line = fit_line(contexts, steps)
    rows = []
    for row, context, step in zip(table.rows, contexts, steps, strict=True):
        beta, speedup = float(row["acceptance_rate"]), float(row["speedup"])
        exact = (speedup - 1) / (beta - speedup * _DRAFT_B / _TARGET_B)
        rows.append(
            [
                f"{row['input_tokens']} + {row['output_tokens']}",
                f"{context:.0f}",
                f"{step * 1e3:.1f}",
                row["acceptance_rate"],
                row["speedup"],
                f"{float(row['spec']) / float(row['no_spec']):.2f}",
                f"{exact:.2f}",
                f"{missing_steps(beta, speedup, _DRAFT_B / _TARGET_B, 3):.2f}",
            ]
        )
    head = ["tokens in + out", "mean context", "plain step, ms", "β", "published speedup", "spec / no_spec"]
    head += ["K for which (1) is exact", "missing steps, K = 3"]
    bandwidth = _KV_BYTES / line.slope
    weights = 2e9 * _TARGET_B / line.fixed
    return "\n\n".join(
        (
            "## The article: lengths",
            f"Source: {table.source}. The mean context is the input and half the output, batch 1.",
            markdown(head, rows),
            "* (1) is exact for no whole K, and not for the same one in each row.\n"
            f"* The step follows {line.fixed * 1e3:.0f} ms + {line.slope * 1e6:.1f} µs per token of context within "
            f"{line.worst:.1%}. A token's keys and values are {_KV_BYTES / 1024:.0f} KiB in 16 bits, so they would be "
            f"read at {bandwidth / 1e9:.0f} GB/s, while {2 * _TARGET_B:.0f} GB of weights in the fixed part are read "
            f"at {weights / 1e12:.1f} TB/s or more. Reading the cache cannot be what halves the rate; something else "
            "that grows with the text is in these figures, and in both columns, or the speedup would have grown.",
        )
    )


_SECTIONS = (
    ("golden_acceptance_length.csv", curves),
    ("throughput_by_k_and_batch.csv", throughput),
    ("llama70b_draft_choice.csv", draft_choice),
    ("llama70b_draft8b_batch.csv", batches),
    ("llama70b_lengths.csv", text_lengths),
)


def page(folder: Path) -> str:
    """The whole file. Raises UsageError where a table cannot be read."""
    parts = [
        "# Published figures and the formulas",
        "None of these figures was measured with spectune. `make reference` computes this page again from "
        "`tests/data/reference/`.",
        *(write(read_table(folder / name)) for name, write in _SECTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the tables.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
) -> None:
    """Write what the formulas say about published figures."""
    try:
        write_atomically(output, page(folder))
    except SpectuneError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    typer.run(main)
