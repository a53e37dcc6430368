"""`states`, one word for how an optimizer stores its states; `keep_32bit` and `min_8bit_size`, which choose parameters
with fp32 moments; and `policy` as a mapping or a callable."""

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import bits, set_grads, train

import torch_ext

BF16, FP16, FP32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
WORDS = ("fp32", "bf16", "bf16_remainder", "8bit")

# model's dtype -> word -> stored dtype of the moments, and the state's key for masters. None: an error.
ORACLE: dict[torch.dtype, dict[str | None, tuple[torch.dtype, str | None] | None]] = {
    BF16: {
        None: (BF16, "master_param"),
        "fp32": (FP32, "master_param"),
        "bf16": (BF16, "master_param"),
        "bf16_remainder": (BF16, "master_remainder"),
        "8bit": (U8, "master_remainder"),
    },
    FP16: {
        None: (FP32, "master_param"),
        "fp32": (FP32, "master_param"),
        "bf16": (BF16, "master_param"),
        "bf16_remainder": None,
        "8bit": (U8, "master_param"),
    },
    FP32: {
        None: (FP32, None),
        "fp32": (FP32, None),
        "bf16": (BF16, None),
        "bf16_remainder": None,
        "8bit": (U8, None),
    },
}
# word -> the equivalent keys of a policy, for a bf16 model
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
    "bf16": {},
    "bf16_remainder": {"store_param_remainders": True},
    "8bit": {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
}


class Model(nn.Module):
    """An embedding, blocks with norms, and a head; parameters have 3 to 1300 elements."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 100)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(10), "proj": nn.Linear(10, 41)}) for _ in "ab")
        self.head = nn.Linear(129, 3)
        self.to(dtype)


def stored(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> tuple[torch.dtype, torch.dtype, str | None]:
    """Returns the dtypes of both moments, and the state's key for the master if there is one."""
    state = optimizer.state[p]
    masters = [key for key in ("master_param", "master_remainder") if key in state]
    assert len(masters) <= 1
    return state["exp_avg"].dtype, state["exp_avg_sq"].dtype, masters[0] if masters else None


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    return {p: name for name, p in model.named_parameters()}


# -- the words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch_ext.AdamW, torch_ext.Adam], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("word", [None, *WORDS])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_word_decides_what_is_stored(dtype: torch.dtype, word: Any, kind: Any) -> None:
    model, expected = Model(dtype), ORACLE[dtype][word]
    if expected is None:
        with pytest.raises(ValueError, match=f"states={word} contradicts the model's param_dtype"):
            kind(model.parameters(), states=word)
        return
    optimizer = kind(model.parameters(), states=word)
    train(optimizer, range(1))
    assert {stored(optimizer, p) for p in model.parameters()} == {(expected[0], expected[0], expected[1])}
    assert optimizer.policy.states == word


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_layers_that_are_frozen_still_are_of_their_dtype(dtype: torch.dtype) -> None:
    """An optimizer may be created before any of its parameters is unfrozen."""
    for word, expected in ORACLE[dtype].items():
        if expected is not None:
            model = Model(dtype).requires_grad_(False)
            optimizer = torch_ext.AdamW(model.parameters(), states=word)  # type: ignore[arg-type]
            assert optimizer.policy.param_dtype is dtype
            model.requires_grad_(True)
            train(optimizer, range(1))
            assert {stored(optimizer, p) for p in model.parameters()} == {(expected[0], expected[0], expected[1])}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_trains_the_bits_of_its_keys(word: Any) -> None:
    def trained(**options: Any) -> list[bytes]:
        torch.manual_seed(0)
        model = Model()
        train(torch_ext.AdamW(model.named_parameters(), lr=0.01, **options), range(4))
        return [bits(p) for p in model.parameters()]

    expected = trained(policy=torch_ext.load_policy(BF16, override_optimizer_config=KEYS[word]))
    assert trained(states=word) == expected
    assert trained(policy=KEYS[word]) == expected, "as a mapping"
    assert trained(policy=lambda policy: KEYS[word]) == expected, "as a callable"
    assert trained(policy={"states": word}) == expected
    assert trained(policy=torch_ext.load_policy(BF16), states=word) == expected, "nothing in it was explicit"
    assert trained(policy=torch_ext.load_policy(BF16, override_optimizer_config=KEYS[word]), states=word) == expected
    if word == "8bit":
        torch.manual_seed(0)
        model = Model()
        optimizer = torch_ext.AdamW8bit(model.named_parameters(), lr=0.01)
        train(optimizer, range(4))
        assert [bits(p) for p in model.parameters()] == expected and isinstance(optimizer, torch_ext.AdamW)


@pytest.mark.parametrize(
    ("word", "nbytes"), [("fp32", 16.0), ("bf16", 12.0), ("bf16_remainder", 10.01), ("8bit", 8.02)]
)
def test_bytes_of_a_word_are_those_of_the_documentation(word: Any, nbytes: float) -> None:
    """Counts weight, gradient, states and checksums."""
    p = nn.Parameter(torch.zeros(1 << 17, dtype=BF16))
    optimizer = torch_ext.AdamW([p], states=word)
    train(optimizer, range(1))
    size = 2 * p.nbytes + sum(t.nbytes for t in optimizer.state[p].values())
    assert size / p.numel() == pytest.approx(nbytes, abs=0.01)


def test_a_callable_sees_the_policy_of_the_parameters_and_its_error_comes_out() -> None:
    seen = []

    def ask(policy: torch_ext.Policy) -> dict[str, Any]:
        seen.append(policy)
        return {"exp_avg_dtype": "fp32"} if policy.bf16 else {}

    optimizer = torch_ext.AdamW(Model().parameters(), policy=ask)
    assert len(seen) == 1 and seen[0].param_dtype == BF16
    assert optimizer.policy.exp_avg_dtype == FP32 and optimizer.policy.exp_avg_sq_dtype == BF16

    def broken(policy: torch_ext.Policy) -> dict[str, Any]:
        raise ValueError("override_optimizer_config is what I say")

    with pytest.raises(ValueError, match="^override_optimizer_config is what I say$"):
        torch_ext.AdamW(Model().parameters(), policy=broken)


def test_hyper_parameters_of_a_mapping_are_what_the_optimizer_starts_from() -> None:
    optimizer = torch_ext.AdamW(Model().parameters(), policy={"lr": 0.5, "adam_beta2": 0.5, "states": "8bit"})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.5, (0.9, 0.5))


# -- which parameters keep fp32 moments ---------------------------------------------------------------------------

# what is passed as keep_32bit -> which names it selects
SELECTIONS: dict[str, tuple[Callable[[Model], Any], Callable[[str], bool]]] = {
    "nothing": (lambda m: (), lambda name: False),
    "a name": (lambda m: "head.bias", lambda name: name == "head.bias"),
    "a pattern": (lambda m: ["*norm*"], lambda name: "norm" in name),
    "a module by name": (lambda m: ["blocks.0"], lambda name: name.startswith("blocks.0.")),
    "a pattern of modules": (lambda m: ["blocks.*.proj"], lambda name: ".proj." in name),
    "a module": (lambda m: m.embed, lambda name: name.startswith("embed")),
    "a module with children": (lambda m: [m.blocks[1]], lambda name: name.startswith("blocks.1.")),
    "a type": (lambda m: nn.Embedding, lambda name: name.startswith("embed")),
    "types": (lambda m: (nn.Embedding, nn.LayerNorm), lambda name: "embed" in name or "norm" in name),
    "all kinds": (lambda m: ["*.bias", m.head, nn.LayerNorm], lambda n: "bias" in n or "head" in n or "norm" in n),
}


@pytest.mark.parametrize("seed", range(40))
def test_mixtures_against_the_table_and_the_bits_of_explicit_policies(seed: int) -> None:
    """Random model, word, selection, size, groups and way to pass them. Each parameter must be stored as the table
    says, and have the bits of a separate optimizer whose policy sets every key."""
    rng = random.Random(seed)
    dtype, word = rng.choice([BF16, BF16, FP16, FP32]), rng.choice([None, *WORDS])
    what, size = rng.choice(list(SELECTIONS)), rng.choice([0, 0, 11, 410, 411, 1301, 2**31 - 1])
    expected = ORACLE[dtype][word]
    if expected is None:
        word, expected = "8bit", ORACLE[dtype]["8bit"]
    assert expected is not None
    torch.manual_seed(seed)
    model = Model(dtype)
    reference = copy.deepcopy(model)
    given, means = SELECTIONS[what]
    names = list(names_of(model).values())
    grouped = rng.choice([None, True, False, "*proj*"])
    second = {name for name in names if "blocks" in name} if grouped is not None else set()

    def keeps(name: str) -> bool:
        if name in second and grouped is not None:
            return "proj" in name if isinstance(grouped, str) else bool(grouped)
        return means(name)

    params: Any = list(model.named_parameters())
    if second:
        first = [(n, p) for n, p in params if n not in second]
        params = [{"params": first}, {"params": [x for x in params if x[0] in second], "keep_32bit": grouped}]
        if not any(means(n) and n not in second for n, _ in model.named_parameters()):
            what = "nothing" if what not in ("a pattern of modules", "a pattern") else what
    way = rng.choice(["argument", "mapping", "policy", "callable"])
    config: dict[str, Any] = {}
    if word is not None:
        config["states"] = word
    if size:
        config["min_8bit_size"] = size
    options: dict[str, Any] = config
    if way != "argument":
        made = torch_ext.load_policy(dtype, override_optimizer_config=config)
        options = {"policy": {"mapping": config, "policy": made, "callable": lambda policy: config}[way]}
    optimizer = torch_ext.AdamW(params, lr=0.01, keep_32bit=given(model), seed=seed, **options)
    train_by_name(optimizer, model, names)

    for name, p in model.named_parameters():
        kept = keeps(name) or (expected[0] == U8 and p.numel() < size)
        moments = FP32 if kept else expected[0]
        assert stored(optimizer, p) == (moments, moments, expected[1]), (name, kept)
        explicit = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        explicit |= {"store_param_remainders": True} if expected[1] == "master_remainder" else {}
        alone = reference.get_parameter(name)
        own = torch_ext.AdamW(
            [(name, alone)],
            lr=0.01,
            seed=seed,
            policy=torch_ext.load_policy(dtype, override_optimizer_config=explicit),
        )
        train_by_name(own, reference, names)
        assert bits(alone) == bits(p), name


def train_by_name(optimizer: torch.optim.Optimizer, model: nn.Module, names: list[str]) -> None:
    for step in range(3):
        set_grads([model.get_parameter(name) for name in names], step)
        optimizer.step()


def keeping(model: Model, **options: Any) -> torch_ext.AdamW:
    """Returns an 8-bit AdamW of the model's named parameters."""
    return torch_ext.AdamW(model.named_parameters(), lr=0.01, states="8bit", **options)


def dtypes(optimizer: torch.optim.Optimizer, model: Model) -> dict[str, torch.dtype]:
    return {name: optimizer.state[p]["exp_avg"].dtype for p, name in names_of(model).items()}


def kept(model: Model, means: Callable[[str], bool]) -> dict[str, torch.dtype]:
    """Returns the expected dtype of each parameter's moments: fp32 if `means` selects it, else 8-bit codes."""
    return {name: FP32 if means(name) else U8 for name, _ in model.named_parameters()}


NORMS: Callable[[str], bool] = lambda name: "norm" in name  # noqa: E731


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_keep_what_was_kept(how: str) -> None:
    model = Model()
    optimizer = keeping(model, keep_32bit=nn.LayerNorm)
    train(optimizer, range(2))
    both: Any
    if how == "deepcopy":
        both = copy.deepcopy((model, optimizer))
    elif how == "pickle":
        both = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        both = torch.load(file, weights_only=False)
    for m, o in ((model, optimizer), both):
        train(o, range(2, 4))
        assert dtypes(o, m) == kept(m, NORMS)
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in both[0].parameters()]


def test_a_state_dict_comes_back_bit_for_bit_and_says_nothing_of_it() -> None:
    model = Model()
    optimizer = keeping(model, keep_32bit="*norm*", min_8bit_size=50)
    train(optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert all("keep_32bit" not in group for group in saved["param_groups"])
    other = copy.deepcopy(model)
    resumed = keeping(other, keep_32bit="*norm*", min_8bit_size=50)
    resumed.load_state_dict(saved)
    assert dtypes(resumed, other) == dtypes(optimizer, model)
    for o in (optimizer, resumed):
        train(o, range(3, 6))
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in other.parameters()]


@pytest.mark.parametrize(("before", "after"), [((), "*norm*"), ("*norm*", ()), ("*bias", "*norm*")])
def test_what_is_loaded_becomes_what_the_optimizer_keeps(before: Any, after: Any) -> None:
    model = Model()
    optimizer = keeping(model, keep_32bit=before)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    resumed = keeping(model, keep_32bit=after)
    resumed.load_state_dict(saved)
    train(resumed, range(2, 3))
    assert dtypes(resumed, model) == kept(model, NORMS if after else lambda name: False)


def test_a_group_that_is_added_follows_the_argument_unless_it_says_otherwise() -> None:
    model = Model()
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {"embed": [], "blocks": [], "head": []}
    for name, p in model.named_parameters():
        parts[name.split(".")[0]].append((name, p))
    optimizer = torch_ext.AdamW(
        parts["embed"] + parts["head"],
        states="8bit",
        keep_32bit=["*norm*", "embed", model.blocks[1], nn.LayerNorm][1:2],
    )
    optimizer.add_param_group({"params": parts["blocks"], "keep_32bit": [nn.LayerNorm, model.blocks[1]["proj"]]})
    train(optimizer, range(1))
    found = dtypes(optimizer, model)
    assert found == kept(model, lambda n: "norm" in n or n.startswith(("embed", "blocks.1.proj")))
    follows = torch_ext.AdamW(parts["blocks"], states="8bit", keep_32bit=[nn.LayerNorm, "*.bias"])
    follows.add_param_group({"params": parts["embed"] + parts["head"]})
    train(follows, range(1))
    assert dtypes(follows, model) == kept(model, lambda n: "norm" in n or n.endswith("bias"))
    exempt = torch_ext.AdamW(parts["blocks"], states="8bit", keep_32bit=[nn.LayerNorm, "*.bias"])
    exempt.add_param_group({"params": parts["embed"] + parts["head"], "keep_32bit": False})
    train(exempt, range(1))
    assert dtypes(exempt, model) == kept(model, lambda n: n.startswith("blocks") and ("norm" in n or "bias" in n))


def test_an_optimizer_that_keeps_nothing_has_torchs_groups() -> None:
    optimizer = keeping(Model())
    assert "keep_32bit" not in optimizer.param_groups[0] and "keep_32bit" not in optimizer.defaults


def test_wrappers_and_tied_weights_are_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    model = Model()
    tied = nn.Linear(100, 13, bias=False, dtype=BF16)
    tied.weight = model.embed.weight
    optimizer = torch_ext.AdamW(Wrapper(model).named_parameters(), states="8bit", keep_32bit=["embed.weight"])
    train(optimizer, range(1))
    assert dtypes(optimizer, model) == kept(model, lambda name: "embed" in name)
    by_tie = torch_ext.AdamW(model.parameters(), states="8bit", keep_32bit=tied)
    train(by_tie, range(1))
    assert dtypes(by_tie, model) == kept(model, lambda name: "embed" in name)


def test_a_list_beside_a_group_that_was_changed_is_refused() -> None:
    """keep_32bit of a group is stored as a list, which must fit the group's parameters."""
    optimizer = keeping(Model(), keep_32bit="*norm*")
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="group 0 has 10 parameters, and its 'keep_32bit' has 11 entries"):
        optimizer.master_state_dict()


# -- on the host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_on_the_host_the_weights_are_the_same(fraction: float) -> None:
    found = []
    for offload in (0.0, fraction):
        torch.manual_seed(3)
        model = Model()
        optimizer = keeping(model, keep_32bit="*norm*", min_8bit_size=200, offload_fraction=offload)
        train(optimizer, range(3))
        found.append([bits(p) for p in model.parameters()])
    assert found[0] == found[1]
