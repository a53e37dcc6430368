"""Constants of the C headers, under their names without TX_. tests/torch/test_abi.py compares each with its header."""

ERROR_INVALID_ARGUMENT, ERROR_DTYPE, ERROR_DEVICE, ERROR_BAD_STATE, ERROR_OUT_OF_MEMORY = 100, 201, 204, 205, 300

UNSET, NO_INT = -1, -(2**63)
"""What stands for a flag, and for an integer of the policy, that was not set."""
PRESET_SEED, PRESET_CONSERVATIVE = 0, 1
SOURCE_DEFAULT, SOURCE_CONFIG, SOURCE_DTYPE, SOURCE_PRESET, SOURCE_FOLLOWS, SOURCE_OVERRIDE, SOURCE_HOOK = range(7)
SIDE_OPTIMIZER, SIDE_DDP = 1, 2
FIELD_F64, FIELD_I64, FIELD_DTYPE, FIELD_BOOL, FIELD_ENUM, FIELD_TEXT, FIELD_I32 = range(7)
VALUE_NONE, VALUE_BOOL, VALUE_INT, VALUE_FLOAT, VALUE_TEXT, VALUE_DTYPE = range(6)

NEAREST, DITHERED, STOCHASTIC = 0, 1, 2
FORMAT_SIGNED, FORMAT_SQRT, FORMAT_MOMENTUM = 0, 1, 2
BLOCK = 128
"""Elements per block scale."""

NORM_LIMBS, STATS_LEN = 20, 21
HEALTH_LEN = 69
LINK_ROUNDS = 6
"""Rounds in which a link's bandwidth is measured."""

MUON_ADD_PRODUCT, MUON_MIRRORED, MUON_SHIFTED = 1, 2, 3
MUON_ORTHOGONAL, MUON_NOT_FINITE, MUON_REFUSED = range(3)
MUON_PER_LANE = 3
"""How many matrices a thread multiplies on its own, one after the other, before weights are updated."""
MUON_STACK, MUON_WINDOW = 1 << 24, 1 << 26
"""On a GPU: the most elements of a stack of matrices, and the most bytes of momentum at a time."""

EXTERNAL_IGNORE, EXTERNAL_RESYNC, EXTERNAL_CHECK = 0, 1, 2
CHECKSUM_CHECK, CHECKSUM_RESYNC, CHECKSUM_RENEW = 0, 1, 2
CHECKSUM, SAMPLED = 1024, 4096
"""Weights per checksum. CHECKSUM: of weights with remainders. SAMPLED: of weights with fp32 masters."""
SAMPLE_RUN, SAMPLE_STRIDE = 32, 2048
"""Which of SAMPLED weights a checksum reads (csrc/math/checksum.h): the first SAMPLE_RUN of every SAMPLE_STRIDE. A
tensor of at most SAMPLED weights is read completely."""
