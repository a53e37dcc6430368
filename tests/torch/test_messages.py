"""The full text of errors, for mistakes of newcomers who know torch.optim, bitsandbytes, torchao, apex, Transformer
Engine, Megatron-LM or DeepSpeed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_ext

MODEL = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
AdamW: Any = torch_ext.AdamW
AdamW8bit: Any = torch_ext.AdamW8bit
Muon: Any = torch_ext.Muon


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]


def used_up() -> Any:
    params = MODEL.parameters()
    list(params)
    return params


def unknown(name: str, instead: str, kind: str = "AdamW") -> str:
    return f"{kind}() has no argument {name!r}: {instead}"


WORDS = "states='fp32', 'bf16', 'bf16_remainder' or '8bit' says how the optimizer's states are stored"
CLIP = "call torch_ext.clip_grad_norm_(optimizer, max_norm) before step(), or pass policy={'clip_grad': max_norm}"
OF_ADAMW = "adamw={'lr': ..., 'betas': ..., 'eps': ..., 'weight_decay': ...} sets it for parameters that AdamW steps"
LEGAL_STATES = "legal: none, fp32, bf16, bf16_remainder, 8bit"
LEGAL_STRATEGIES = "legal: no_shard, optim, optim_grads, optim_grads_params"
LEGAL_POLICY = "what torch_ext.load_policy returns, a mapping of its keys, or a callable that returns one, is legal"
LEGAL_KEPT = (
    "names of parameters or modules (patterns with *, ? and [] among them), modules, and types of modules such as "
    "torch.nn.Embedding are legal"
)
NAMES = "(0.weight, 0.bias, 1.weight, 1.bias); a part of a name is a pattern, '*norm*'"

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # arguments of other libraries
    "state_dtype": (lambda: AdamW(one(), state_dtype=torch.bfloat16), TypeError, unknown("state_dtype", WORDS)),
    "optim_bits of bitsandbytes": (
        lambda: AdamW(one(), optim_bits=8),
        TypeError,
        unknown(
            "optim_bits",
            "states='8bit' (or torch_ext.AdamW8bit) stores moments in 8 bits, states='bf16' in 16, states='fp32' in 32",
        ),
    ),
    "percentile_clipping of bitsandbytes": (
        lambda: AdamW8bit(one(), percentile_clipping=5),
        TypeError,
        unknown("percentile_clipping", f"gradients are clipped by their norm: {CLIP}", "AdamW8bit"),
    ),
    "is_paged of bitsandbytes": (
        lambda: AdamW8bit(one(), is_paged=True),
        TypeError,
        unknown(
            "is_paged",
            "states do not move between devices by themselves; offload_fraction=1.0 keeps all states on the host, and "
            "steps there",
            "AdamW8bit",
        ),
    ),
    "block_size of torchao": (
        lambda: AdamW8bit(one(), block_size=256),
        TypeError,
        unknown("block_size", "8-bit moments always have a scale for each 128 elements; leave it out", "AdamW8bit"),
    ),
    "bf16_stochastic_round of torchao": (
        lambda: AdamW(one(), bf16_stochastic_round=True),
        TypeError,
        unknown(
            "bf16_stochastic_round",
            "masters keep what bf16 weights cannot; without them, policy={'main_params_dtype': None}, "
            "weight_rounding='stochastic' rounds as torchao does",
        ),
    ),
    "adam_w_mode of apex": (
        lambda: AdamW(one(), adam_w_mode=True),
        TypeError,
        unknown(
            "adam_w_mode",
            "torch_ext.AdamW decouples weight decay, torch_ext.Adam does not (decoupled_weight_decay=False)",
        ),
    ),
    "master_weights of Transformer Engine": (
        lambda: AdamW(one(), master_weights=True),
        TypeError,
        unknown(
            "master_weights",
            f"16-bit weights have masters unless policy={{'main_params_dtype': None}} says otherwise; {WORDS}",
        ),
    ),
    "exp_avg_dtype of Megatron-LM": (
        lambda: AdamW(one(), exp_avg_dtype=torch.float16),
        TypeError,
        unknown("exp_avg_dtype", "it is a key of the policy: policy={'exp_avg_dtype': ...}"),
    ),
    "bucket_size of Megatron-LM": (
        lambda: AdamW(one(), bucket_size=40000000),
        TypeError,
        unknown(
            "bucket_size",
            "it is a key of load_policy(model, override_ddp_config={'bucket_size': ...}), for parallelize",
        ),
    ),
    "fp32_optimizer_states of DeepSpeed": (
        lambda: AdamW(one(), fp32_optimizer_states=True),
        TypeError,
        unknown("fp32_optimizer_states", WORDS),
    ),
    "max_grad_norm of transformers": (
        lambda: AdamW(one(), max_grad_norm=1.0),
        TypeError,
        unknown("max_grad_norm", CLIP),
    ),
    "beta1": (lambda: AdamW(one(), beta1=0.9), TypeError, unknown("beta1", "betas=(beta1, beta2) takes both")),
    "learning_rate": (
        lambda: AdamW(one(), learning_rate=0.1),
        TypeError,
        unknown("learning_rate", "it is lr here, as in torch.optim"),
    ),
    "a misspelt one": (
        lambda: AdamW(one(), weight_deacy=0.1),
        TypeError,
        unknown("weight_deacy", "the nearest is weight_decay"),
    ),
    "one like no other": (
        lambda: torch_ext.Adam(one(), zeal=2),  # type: ignore[call-arg]
        TypeError,
        unknown(
            "zeal",
            "it has params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, "
            "differentiable, fused, "
            "decoupled_weight_decay, states, min_8bit_size, keep_32bit, policy, moment_rounding, "
            "weight_rounding, seed, "
            "skip_nonfinite, on_external_write, offload_fraction, step_in_backward, ema_decay, ema_dtype, "
            "ema_every",
            "Adam",
        ),
    ),
    "bitsandbytes' positions": (
        lambda: AdamW(one(), 1e-3, (0.9, 0.99), 1e-8, 0.1, False, 8),
        TypeError,
        "AdamW(): too many positional arguments; params, lr, betas, eps, weight_decay, amsgrad may be given "
        "by position, "
        "in this order, all others by name; params is required",
    ),
    "no params": (
        lambda: AdamW(),
        TypeError,
        "AdamW(): missing a required argument: 'params'; params, lr, betas, eps, weight_decay, amsgrad may be given by "
        "position, in this order, all others by name; params is required",
    ),
    # values
    "one beta": (
        lambda: AdamW(one(), betas=0.9),
        TypeError,
        "betas is 0.9, a float; two numbers in [0, 1) are legal: (0.9, 0.999), say",
    ),
    "lr as text": (
        lambda: AdamW(one(), lr="3e-4"),
        TypeError,
        "lr is '3e-4', text; a finite number >= 0 is legal: 0.0003, not in quotes (YAML takes 1e-5 for text, "
        "and 1.0e-5 "
        "for a number)",
    ),
    "fused and foreach": (
        lambda: AdamW(one(), fused=True, foreach=True),
        ValueError,
        "fused=True and foreach=True exclude each other (in torch.optim, too): the step is always fused; "
        "leave out both",
    ),
    "amsgrad": (
        lambda: AdamW(one(), amsgrad=True),
        ValueError,
        "amsgrad=True is not supported: leave it out (the default of torch too), or use torch.optim.AdamW",
    ),
    # params
    "a model": (
        lambda: AdamW(MODEL),
        TypeError,
        "params is a Sequential, a module: pass model.named_parameters(), or model.parameters()",
    ),
    "names": (
        lambda: AdamW([name for name, _ in MODEL.named_parameters()]),
        TypeError,
        "params is a list of names, '0.weight' the first: pass the parameters, [p for name, p in "
        "model.named_parameters() if name in names], or pairs of a name and a parameter",
    ),
    "a state_dict": (
        lambda: AdamW(MODEL.state_dict()),
        TypeError,
        "params is a mapping: pass its items(), pairs of a name and a parameter",
    ),
    "one group": (
        lambda: AdamW({"params": one()}),
        TypeError,
        "params is one group, a dict: pass a list of groups, [group]",
    ),
    "modules": (
        lambda: AdamW(MODEL.children()),
        TypeError,
        "params is a list of modules, a Linear the first: pass their parameters, "
        '[{"params": module.parameters()} for module in modules]',
    ),
    "an iterator that was used": (
        lambda: AdamW(used_up()),
        ValueError,
        "params is empty: an iterator such as model.parameters() gives its parameters once only, and a model whose "
        "parameters are all elsewhere (on another pipeline stage, say) needs no optimizer",
    ),
    "a number": (
        lambda: AdamW(0.001),
        TypeError,
        "params is a float: pass model.named_parameters(), model.parameters(), or a list of groups",
    ),
    # states
    "a wrong word": (
        lambda: AdamW(one(), states="8-bit"),
        ValueError,
        f"the argument: states='8-bit' is not legal: the nearest is 8bit; {LEGAL_STATES}",
    ),
    "another's word": (
        lambda: AdamW(one(), states="int8"),
        ValueError,
        f"the argument: states='int8' is not legal: int8 is 8bit here; {LEGAL_STATES}",
    ),
    "a dtype as states": (
        lambda: AdamW(one(), states=torch.bfloat16),
        TypeError,
        "states is torch.bfloat16: it takes a word, not a dtype; 'fp32', 'bf16', 'bf16_remainder', '8bit' are legal",
    ),
    "bits as states": (
        lambda: AdamW(one(), states=8),
        TypeError,
        "states is 8; 'fp32', 'bf16', 'bf16_remainder', '8bit' are legal",
    ),
    "remainders beside fp32": (
        lambda: AdamW(MODEL.parameters(), states="bf16_remainder"),
        ValueError,
        "the argument states=bf16_remainder contradicts the model's param_dtype=fp32: remainders need bf16 weights; "
        "change one of them",
    ),
    "states and a policy": (
        lambda: AdamW(
            one(),
            states="8bit",
            policy=torch_ext.load_policy(torch.bfloat16, override_optimizer_config={"exp_avg_dtype": "bf16"}),
        ),
        ValueError,
        "the argument states=8bit contradicts the policy's exp_avg_dtype=bf16: states sets both moments and the "
        "masters; change one of them",
    ),
    "states twice": (
        lambda: AdamW(one(), states="8bit", policy={"states": "bf16"}),
        ValueError,
        "the argument states=8bit contradicts the policy's states=bf16: both set the same key; change one of them",
    ),
    "states of a group": (
        lambda: AdamW([{"params": one(), "states": "8bit"}]),
        ValueError,
        "group 0: 'states' is one per optimizer, not per group: pass states= to the constructor, and make a second "
        "optimizer for parameters that need another",
    ),
    # policy
    "a word as policy": (
        lambda: AdamW(one(), policy="bf16"),
        TypeError,
        f"policy is 'bf16', text; {LEGAL_POLICY}. states='bf16' is the word for how states are stored",
    ),
    "text as policy": (lambda: AdamW(one(), policy="auto"), TypeError, f"policy is 'auto', text; {LEGAL_POLICY}"),
    "a dtype as policy": (
        lambda: AdamW(one(), policy=torch.bfloat16),
        TypeError,
        f"policy is torch.bfloat16, a dtype; {LEGAL_POLICY}: torch_ext.load_policy(torch.bfloat16)",
    ),
    "a class as policy": (
        lambda: AdamW(one(), policy=torch_ext.Policy),
        TypeError,
        f"policy is a type; {LEGAL_POLICY}",
    ),
    "a key of policy that is misspelt": (
        lambda: AdamW(one(), policy={"exp_avg_dtyp": "fp8"}),
        ValueError,
        "policy: unknown key 'exp_avg_dtyp'; the nearest is exp_avg_dtype",
    ),
    "a key of buckets in policy": (
        lambda: AdamW(one(), policy={"bucket_size": 5}),
        ValueError,
        "policy: bucket_size is a key of override_ddp_config",
    ),
    # keep_32bit, min_8bit_size
    "a part of a name": (
        lambda: AdamW(MODEL.named_parameters(), keep_32bit="norm"),
        ValueError,
        f"keep_32bit has 'norm', which selects none of the parameters {NAMES}",
    ),
    "a name without names": (
        lambda: AdamW(one(), keep_32bit="norm"),
        ValueError,
        "keep_32bit has the name 'norm', and the names of the parameters are not known: pass "
        "model.named_parameters() as "
        "params",
    ),
    "a type that the model has not": (
        lambda: AdamW(MODEL.named_parameters(), keep_32bit=nn.Bilinear),
        ValueError,
        f"keep_32bit has the type Bilinear, which selects none of the parameters {NAMES}",
    ),
    "another model's module": (
        lambda: AdamW(MODEL.named_parameters(), keep_32bit=[nn.Linear(1, 1)]),
        ValueError,
        f"keep_32bit has a Linear, which selects none of the parameters {NAMES}",
    ),
    "a flag": (
        lambda: AdamW(MODEL.named_parameters(), keep_32bit=True),
        TypeError,
        f"keep_32bit is True, a bool; {LEGAL_KEPT}",
    ),
    "a parameter": (
        lambda: AdamW(MODEL.named_parameters(), keep_32bit=[MODEL[0].weight]),
        TypeError,
        f"keep_32bit has a tensor; {LEGAL_KEPT}",
    ),
    "a size as text": (
        lambda: AdamW(one(), min_8bit_size="4096"),
        TypeError,
        "min_8bit_size is '4096'; a number of elements, 0 or more, is legal",
    ),
    "a negative size": (
        lambda: AdamW(one(), min_8bit_size=-1),
        ValueError,
        "the argument: min_8bit_size=-1 is not legal; legal: [0, 2147483647]",
    ),
    "two sizes": (
        lambda: AdamW(one(), min_8bit_size=1, policy={"min_8bit_size": 2}),
        ValueError,
        "the argument min_8bit_size=1 contradicts the policy's min_8bit_size=2: both set the same key; change one of "
        "them",
    ),
    # strategies, clipping
    "zero2": (
        lambda: torch_ext.load_policy(MODEL, override_ddp_config={"data_parallel_sharding_strategy": "zero2"}),
        ValueError,
        "override_ddp_config: data_parallel_sharding_strategy='zero2' is not legal: ZeRO-2 is optim_grads here; "
        + LEGAL_STRATEGIES,
    ),
    "FSDP": (
        lambda: torch_ext.load_policy(MODEL, override_ddp_config={"data_parallel_sharding_strategy": "FSDP"}),
        ValueError,
        "override_ddp_config: data_parallel_sharding_strategy='FSDP' is not legal: FSDP is optim_grads_params here; "
        + LEGAL_STRATEGIES,
    ),
    # everything else
    "a lazy module": (
        lambda: AdamW(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(8)).parameters()),
        ValueError,
        "parameter 2 of group 0 is a parameter of a lazy module, which has no shape yet: call the model with a batch, "
        "and make the optimizer then",
    ),
    "a path is loaded": (
        lambda: AdamW(one()).load_state_dict("checkpoint.pt"),
        TypeError,
        "load_state_dict() was given a str: what state_dict() returned, or torch.load of its file, is legal",
    ),
    "a model's state is loaded": (
        lambda: AdamW(one()).load_state_dict(MODEL.state_dict()),
        ValueError,
        "this is not the state_dict of an optimizer: it has no 'state', but '0.weight', '0.bias', '1.weight', '1.bias'",
    ),
    "an empty state is loaded": (
        lambda: AdamW(one()).load_state_dict({}),
        ValueError,
        "this is not the state_dict of an optimizer: it has no 'state', but nothing",
    ),
    "states of AdamW8bit": (
        lambda: torch_ext.AdamW8bit(one(), states="8bit"),  # type: ignore[call-arg]
        TypeError,
        unknown("states", "this class always has states='8bit'; torch_ext.AdamW takes the other values", "AdamW8bit"),
    ),
    "decoupled_weight_decay of AdamW": (
        lambda: AdamW(one(), decoupled_weight_decay=False),
        TypeError,
        unknown(
            "decoupled_weight_decay",
            "torch_ext.AdamW decouples weight decay, torch_ext.Adam does not (decoupled_weight_decay=False)",
        ),
    ),
    "strategy": (
        lambda: AdamW(one(), strategy="optim"),
        TypeError,
        unknown("strategy", "torch_ext.parallelize(model, policy, strategy=...) takes it, before the optimizer steps"),
    ),
    "step_in_backward of Muon": (
        lambda: Muon(one(), step_in_backward=True),
        TypeError,
        unknown(
            "step_in_backward",
            "Muon needs the whole gradient of a matrix, so it cannot step in backward; leave it out",
            "Muon",
        ),
    ),
    "offload_fraction of Muon": (
        lambda: Muon(one(), offload_fraction=0.5),
        TypeError,
        unknown(
            "offload_fraction",
            "Muon's states stay on the device; torch_ext.offload(model, optimizer) takes them off it between steps",
            "Muon",
        ),
    ),
    "fused of Muon": (
        lambda: Muon(one(), fused=True),
        TypeError,
        unknown("fused", "torch.optim.Muon has none either, and the step is always fused; leave it out", "Muon"),
    ),
    "maximize of Muon": (
        lambda: Muon(one(), maximize=True),
        TypeError,
        unknown("maximize", "torch.optim.Muon has none either; minimize the negative loss", "Muon"),
    ),
    "betas of Muon": (
        lambda: Muon(one(), betas=(0.9, 0.95)),
        TypeError,
        unknown("betas", OF_ADAMW, "Muon"),
    ),
    "adamw_lr of Muon": (
        lambda: Muon(one(), adamw_lr=1e-3),
        TypeError,
        unknown("adamw_lr", OF_ADAMW, "Muon"),
    ),
    "a model is clipped": (
        lambda: torch_ext.clip_grad_norm_(MODEL, 1.0),  # type: ignore[arg-type]
        TypeError,
        "clip_grad_norm_() was given a Sequential, a module: pass the optimizer, whose next step() then clips, or "
        "model.parameters()",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_whole_text(case: str) -> None:
    wrong, kind, text = WRONG[case]
    with pytest.raises(kind) as raised:
        wrong()
    assert type(raised.value) is kind and str(raised.value) == text


NAMED = {
    **dict.fromkeys(("zero0", "ZeRO-0", "stage_0", "ddp", "DDP", "DistributedDataParallel"), "no_shard"),
    **dict.fromkeys(
        ("zero1", "ZeRO-1", "zero_1", "stage1", "ZeroRedundancyOptimizer", "distributed optimizer"), "optim"
    ),
    **dict.fromkeys(("zero2", "ZeRO-2", "Zero 2", "stage_2", "SHARD_GRAD_OP"), "optim_grads"),
    **dict.fromkeys(("zero3", "ZeRO-3", "stage 3", "fsdp", "FSDP2", "FULL_SHARD", "fully_shard"), "optim_grads_params"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_strategy_by_anothers_name_says_ours(name: str) -> None:
    given = f"data_parallel_sharding_strategy='{name}'"
    with pytest.raises(ValueError, match=f"{given} is not legal: .* is {NAMED[name]} here; {LEGAL_STRATEGIES}$"):
        torch_ext.load_policy(MODEL, override_ddp_config={"data_parallel_sharding_strategy": name})
