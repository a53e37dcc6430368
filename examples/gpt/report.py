"""The last step of the main job: reads the logs of OUT, prints the tables, writes OUT/results.json, table.md, gpt.png.

python examples/gpt/report.py [OUT]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import picture
import tables
from configurations import CONFIGURATIONS
from results import REFERENCE, Results, collect


def sentences(results: Results) -> str:
    """Returns the results in words."""
    stage = results.stages["finetune"]
    told = [f"Fine-tuned, torch's AdamW on the fp32 model, {stage.memory(REFERENCE):.0f} bytes per parameter:"]
    for name in ("8bit", "torch-bf16"):
        excess = stage.excess(name)
        told.append(
            f"  {CONFIGURATIONS[name].label}, {stage.memory(name):.2f} bytes, ends {abs(excess):.4f} nats "
            f"{'above' if excess > 0 else 'below'} it: {abs(excess) / stage.spread():.1f} times what a seed changes."
        )
    for run in results.stages["scratch"].runs:
        if run.resumed_at:
            what = f"{CONFIGURATIONS[run.configuration].label}, seed {run.seed}"
            told.append(f"From random weights, {what}: new processes went on after step {run.resumed_at}.")
    return "\n".join(told)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    results = collect(out)
    results.save(out / "results.json")
    written = tables.report(results)
    (out / "table.md").write_text(written + "\n")
    picture.draw(results, out / "gpt.png")
    print(f"\n{written}\n\n{sentences(results)}\nPicture: {out / 'gpt.png'}. The figures: {out / 'results.json'}.")
    if not all(math.isfinite(run.held_out) for stage in results.stages.values() for run in stage.runs):
        raise SystemExit("a run ended with a loss that is not finite")


if __name__ == "__main__":
    main()
