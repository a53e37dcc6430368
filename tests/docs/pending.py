"""What the pages speak of and the tree does not have yet. A page that needs one of these is skipped there, by name; one
that has come fails `test_nothing_that_has_come_is_pending` until its line is gone. Empty, this file can be deleted."""

# Names as `code_checks.missing_names` gives them, pages, commands of `python -m torch_ext`, and messages.
PENDING = {
    "AdamW(states=)": "states in one word",
    "AdamW8bit": "AdamW with states='8bit'",
    "DiagnosisError": "with diagnose",
    "Finding": "with diagnose",
    "Report": "with diagnose",
    "diagnose": "what silently loses updates",
    "docs/diagnose.md": "the page of diagnose",
    "docs/recipes/megatron.md": "the recipe for models that are tensor-parallel",
    "docs/recipes/nemo_automodel.md": "the recipe for NeMo Automodel",
    "docs/recipes/torchtitan.md": "the recipe for torchtitan",
    "docs/recipes/trainer.md": "the recipe for the Trainer",
    "docs/recipes/verl.md": "the recipe for verl",
    "docs/release.md": "how a release is made",
    "doctor": "diagnose on the command line",
    "names of configurations": "tests/bench prints a, b and c for bf16, bf16_remainder and 8bit",
    "examples/gpt/finetune.py": "the main job's second half",
    "examples/gpt/results.json": "the main job's results: README's table, and those of docs/benchmarks.md",
    "message: is one word for both moments and the masters": "states in one word",
    "message: which selects none of the parameters": "keep_32bit",
    "message: says how the optimizer's states are stored": "states in one word",
}
