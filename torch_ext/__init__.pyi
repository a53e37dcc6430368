"""The public names and the modules that have them, for type checkers and for `import torch_ext`
(native/public_names.py).
"""

from torch_ext.amp.grad_scaler import GradScaler as GradScaler
from torch_ext.checkpoint.background import AsyncSaver as AsyncSaver
from torch_ext.checkpoint.dcp import CheckpointReader as CheckpointReader
from torch_ext.checkpoint.dcp import CheckpointWriter as CheckpointWriter
from torch_ext.checkpoint.files import load as load
from torch_ext.checkpoint.files import save as save
from torch_ext.checkpoint.incremental import IncrementalWeights as IncrementalWeights
from torch_ext.checkpoint.load_weights import load_weights as load_weights
from torch_ext.diagnosis.diagnose import diagnose as diagnose
from torch_ext.diagnosis.findings import DiagnosisError as DiagnosisError
from torch_ext.diagnosis.findings import Finding as Finding
from torch_ext.diagnosis.findings import Report as Report
from torch_ext.integrations.lightning_callback import lightning_ema_callback as lightning_ema_callback
from torch_ext.integrations.trainer_callback import trainer_ema_callback as trainer_ema_callback
from torch_ext.native.dtypes import coerce_dtypes as coerce_dtypes
from torch_ext.native.paths import get_include as get_include
from torch_ext.native.paths import library_path as library_path
from torch_ext.offloading.offload import offload as offload
from torch_ext.offloading.offload import onload as onload
from torch_ext.optim.adamw import Adam as Adam
from torch_ext.optim.adamw import AdamW as AdamW
from torch_ext.optim.adamw import AdamW8bit as AdamW8bit
from torch_ext.optim.clip_grad import clip_grad_norm_ as clip_grad_norm_
from torch_ext.optim.muon.muon import Muon as Muon
from torch_ext.parallel.bucket_plan import plan_buckets as plan_buckets
from torch_ext.parallel.ddp_comm_hook import register_comm_hook as register_comm_hook
from torch_ext.parallel.parallel_module import sync_parameters as sync_parameters
from torch_ext.parallel.parallelize import parallelize as parallelize
from torch_ext.policy.loader import load_policy as load_policy
from torch_ext.policy.policy import Policy as Policy
from torch_ext.weight_sync.delta_info import DeltaInfo as DeltaInfo
from torch_ext.weight_sync.delta_info import delta_info as delta_info
from torch_ext.weight_sync.publisher import WeightPublisher as WeightPublisher
from torch_ext.weight_sync.skyrl_format import SkyRLVersion as SkyRLVersion
from torch_ext.weight_sync.skyrl_format import skyrl_version as skyrl_version
from torch_ext.weight_sync.slime_format import SlimeVersion as SlimeVersion
from torch_ext.weight_sync.slime_format import slime_version as slime_version
from torch_ext.weight_sync.subscriber import WeightSubscriber as WeightSubscriber
from torch_ext.weight_sync.subscriber import merge_deltas as merge_deltas
from torch_ext.weight_sync.verl_format import verl_flushes as verl_flushes
from torch_ext.weight_sync.weight_patch import WeightPatch as WeightPatch
from torch_ext.weight_sync.weight_slice import WeightSlice as WeightSlice

__version__: str
