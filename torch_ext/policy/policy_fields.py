"""The fields of a policy with their types, for readers, help() and type checkers. csrc/policy.def defines the fields;
tests/torch/test_policy.py compares this file with it."""

from typing import Any, Generic, Literal, NoReturn, TypeVar, overload

import torch
from typing_extensions import Never, Self

T = TypeVar("T")

_Rounding = Literal["nearest", "dithered", "stochastic"]


class Field(Generic[T]):
    """A read-only field of a policy."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance._value_of(self._name)

    def __set__(self, instance: object, value: Never) -> NoReturn:
        raise AttributeError(f"a policy is frozen: give {self._name!r} to load_policy as an override")


class PolicyFields:
    """The fields of a policy, under Megatron-LM's names."""

    __slots__ = ()

    lr = Field[float | None]("Learning rate; None: it was not set.")
    min_lr = Field[float | None]("For learning-rate schedulers; None: it was not set.")
    weight_decay = Field[float]("Weight decay.")
    adam_beta1 = Field[float]("Decay of the average of the gradient.")
    adam_beta2 = Field[float]("Decay of the average of its square.")
    adam_eps = Field[float]("Added to the denominator of the step.")
    clip_grad = Field[float]("Largest norm of all gradients together; 0: they are not clipped.")
    initial_loss_scale = Field[float]("Loss scale of fp16 at the start.")
    min_loss_scale = Field[float]("The loss scale never falls below.")
    loss_scale_growth_factor = Field[float]("By which it grows.")
    loss_scale_backoff_factor = Field[float]("By which it falls.")
    loss_scale_window = Field[int]("Steps without overflow before it grows.")
    hysteresis = Field[int]("Overflows before it falls.")
    bucket_size = Field[int | None]("Elements of a gradient bucket; None: the planner decides.")
    param_dtype = Field[torch.dtype]("Of the model's parameters.")
    main_params_dtype = Field[torch.dtype | None]("Of the masters; None: the weights are their own.")
    exp_avg_dtype = Field[torch.dtype]("Of the average of the gradient; uint8: 8-bit codes with scales.")
    exp_avg_sq_dtype = Field[torch.dtype]("Of the average of its square; uint8: 8-bit codes with scales.")
    main_grads_dtype = Field[torch.dtype]("In which gradients are accumulated.")
    grad_comm_dtype = Field[torch.dtype]("In which they travel between ranks; uint8: 8-bit codes with scales.")
    bf16 = Field[bool]("Whether the model is in bf16.")
    fp16 = Field[bool]("Whether the model is in fp16.")
    use_precision_aware_optimizer = Field[bool]("Whether states may have other dtypes than fp32.")
    store_param_remainders = Field[bool]("Whether masters are kept as the 16 bits that bf16 weights lack.")
    use_distributed_optimizer = Field[bool]("Whether states are cut over the ranks.")
    overlap_param_gather = Field[bool]("Whether weights are gathered beside computation.")
    overlap_grad_reduce = Field[bool]("Whether gradients are reduced beside backward; else in one bucket after it.")
    grad_reduce_in_fp32 = Field[bool]("Whether gradients travel in fp32.")
    check_for_nan_in_grad = Field[bool]("Whether a gradient that is not finite is an error.")
    average_in_collective = Field[bool]("Megatron-LM's; the mean is fp32's either way.")
    pad_buckets_for_high_nccl_busbw = Field[bool]("Whether bucket ends are multiples of 2^16 elements.")
    preserve_fp32_weights = Field[bool]("The old name of main_params_dtype: whether that is fp32.")
    moment_rounding = Field[_Rounding]("How moments are brought to 16 or 8 bits.")
    weight_rounding = Field[_Rounding]("How 16-bit weights without masters are rounded.")
    data_parallel_sharding_strategy = Field[Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]](
        "What is cut over the ranks: nothing, states, gradients too (ZeRO-2), parameters too (ZeRO-3)."
    )
    preset = Field[Literal["seed", "conservative"]]("Which defaults there are.")
    optimizer = Field[str]("Name of the optimizer that the policy is for.")
    grad_gather_dtype = Field[torch.dtype | None]("In which no_shard gathers sums; None: as the wire's dtype says.")
    step_in_backward = Field[bool]("Whether a bucket is stepped as soon as its sum is there.")
    grad_comm_compression = Field[Literal["auto", "off", "on"]]("Whether bf16 messages are compressed, losslessly.")
    shard_dtype = Field[torch.dtype | None]("Of FSDP2's shards beside a narrower param_dtype; None: there are none.")
    states = Field[Literal["fp32", "bf16", "bf16_remainder", "8bit"] | None](
        "One word for how the optimizer's states are stored; None: the dtypes above say so one by one."
    )
    min_8bit_size = Field[int]("Parameters with fewer elements keep fp32 moments beside others of 8 bits.")
    link_gbps = Field[float | None]("What a rank's link carries, in Gbit/s; None: ranks measure it when they agree.")
    create_all_gather_group = Field[bool]("Whether all-gathers between GPUs have a communicator of their own.")
