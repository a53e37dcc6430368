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
    adam_beta1 = Field[float]("Decay rate of exp_avg, the average of the gradient.")
    adam_beta2 = Field[float]("Decay rate of exp_avg_sq, the average of the squared gradient.")
    adam_eps = Field[float]("Added to the denominator of the step.")
    clip_grad = Field[float]("Largest norm of all gradients together; 0: gradients are not clipped.")
    initial_loss_scale = Field[float]("Loss scale of fp16 at the start.")
    min_loss_scale = Field[float]("Smallest loss scale.")
    loss_scale_growth_factor = Field[float]("Factor by which the loss scale grows.")
    loss_scale_backoff_factor = Field[float]("Factor by which the loss scale is multiplied after overflows.")
    loss_scale_window = Field[int]("Steps without overflow before the loss scale grows.")
    hysteresis = Field[int]("Steps with overflow before the loss scale falls.")
    bucket_size = Field[int | None]("Elements of a gradient bucket; None: the planner decides.")
    param_dtype = Field[torch.dtype]("Dtype of the model's parameters.")
    main_params_dtype = Field[torch.dtype | None]("Dtype of the master weights; None: there are none.")
    exp_avg_dtype = Field[torch.dtype]("Dtype of exp_avg; uint8: 8-bit codes with scales.")
    exp_avg_sq_dtype = Field[torch.dtype]("Dtype of exp_avg_sq; uint8: 8-bit codes with scales.")
    main_grads_dtype = Field[torch.dtype]("Dtype in which gradients are accumulated.")
    grad_comm_dtype = Field[torch.dtype](
        "Dtype in which gradients are sent between ranks; uint8: 8-bit codes with scales."
    )
    bf16 = Field[bool]("Whether the model is in bf16.")
    fp16 = Field[bool]("Whether the model is in fp16.")
    use_precision_aware_optimizer = Field[bool]("Whether optimizer states may have other dtypes than fp32.")
    store_param_remainders = Field[bool]("Whether masters are kept as the 16 bits that bf16 weights lack.")
    use_distributed_optimizer = Field[bool]("Whether optimizer states are sharded over the ranks.")
    overlap_param_gather = Field[bool]("Whether weights are all-gathered during computation.")
    overlap_grad_reduce = Field[bool]("Whether gradients are reduced during backward; if not, in one bucket after it.")
    grad_reduce_in_fp32 = Field[bool]("Whether gradients are sent in fp32.")
    check_for_nan_in_grad = Field[bool]("Whether a gradient that is not finite is an error.")
    average_in_collective = Field[bool]("Key of Megatron-LM, without effect: the mean is computed in fp32 either way.")
    pad_buckets_for_high_nccl_busbw = Field[bool]("Whether bucket ends are multiples of 2^16 elements.")
    preserve_fp32_weights = Field[bool]("The old name of main_params_dtype: whether that is fp32.")
    moment_rounding = Field[_Rounding]("How moments are rounded to 16 or 8 bits.")
    weight_rounding = Field[_Rounding]("How 16-bit weights without masters are rounded.")
    data_parallel_sharding_strategy = Field[Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]](
        "What is sharded over the ranks: nothing, optimizer states (ZeRO-1), gradients too (ZeRO-2), parameters too "
        "(ZeRO-3)."
    )
    preset = Field[Literal["seed", "conservative"]]("The set of defaults that the policy starts from.")
    optimizer = Field[str]("Name of the optimizer that the policy is for.")
    grad_gather_dtype = Field[torch.dtype | None](
        "Dtype in which no_shard all-gathers reduced gradients; None: it follows from grad_comm_dtype."
    )
    step_in_backward = Field[bool]("Whether the optimizer steps a bucket as soon as its gradients are reduced.")
    grad_comm_compression = Field[Literal["auto", "off", "on"]]("Whether bf16 messages are compressed, losslessly.")
    shard_dtype = Field[torch.dtype | None](
        "Dtype of FSDP2's shards if it is wider than param_dtype, to which FSDP2 casts them; None: it is not."
    )
    states = Field[Literal["fp32", "bf16", "bf16_remainder", "8bit"] | None](
        "One word for how the optimizer's states are stored; None: the fields above set each dtype."
    )
    min_8bit_size = Field[int]("With 8-bit moments, parameters with fewer elements than this keep fp32 moments.")
    link_gbps = Field[float | None](
        "Bandwidth of a rank's link in Gbit/s; None: ranks measure it when they agree on a layout."
    )
    create_all_gather_group = Field[bool]("Whether all-gathers between GPUs use an NCCL communicator of their own.")
