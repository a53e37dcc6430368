"""Numbers of the C headers, under its names without TX_; tests/torch/test_abi.py compares every one with them."""

ERROR_INVALID_ARGUMENT, ERROR_DTYPE, ERROR_DEVICE, ERROR_BAD_STATE, ERROR_OUT_OF_MEMORY = 100, 201, 204, 205, 300

UNSET, NO_INT = -1, -(2**63)
"""A flag, and an integer of the policy, that nobody gave."""
PRESET_SEED, PRESET_CONSERVATIVE = 0, 1
SOURCE_DEFAULT, SOURCE_CONFIG, SOURCE_DTYPE, SOURCE_PRESET, SOURCE_FOLLOWS, SOURCE_OVERRIDE, SOURCE_HOOK = range(7)
SIDE_OPTIMIZER, SIDE_DDP = 1, 2
FIELD_F64, FIELD_I64, FIELD_DTYPE, FIELD_BOOL, FIELD_ENUM, FIELD_TEXT, FIELD_I32 = range(7)
VALUE_NONE, VALUE_BOOL, VALUE_INT, VALUE_FLOAT, VALUE_TEXT, VALUE_DTYPE = range(6)

NEAREST, DITHERED, STOCHASTIC = 0, 1, 2
FORMAT_SIGNED, FORMAT_SQRT, FORMAT_MOMENTUM = 0, 1, 2
BLOCK = 128
"""Elements per scale."""

NORM_LIMBS, STATS_LEN = 20, 21
HEALTH_LEN = 69
LINK_ROUNDS = 6
"""Of the measurement of a link."""

MUON_ADD_PRODUCT, MUON_MIRRORED, MUON_SHIFTED = 1, 2, 3
MUON_ORTHOGONAL, MUON_NOT_FINITE, MUON_REFUSED = range(3)
MUON_PER_LANE = 3
"""Matrices that a thread multiplies by itself, one after the other, before weights are updated."""

EXTERNAL_IGNORE, EXTERNAL_RESYNC, EXTERNAL_CHECK = 0, 1, 2
CHECKSUM_CHECK, CHECKSUM_RESYNC, CHECKSUM_RENEW = 0, 1, 2
CHECKSUM, SAMPLED = 1024, 4096
"""Weights per checksum: beside remainders, beside fp32 masters."""
SAMPLE_RUN, SAMPLE_STRIDE = 32, 2048
"""The sample of SAMPLED weights (csrc/math/checksum.h): the first so many of every so many. Where there are no more
than SAMPLED, all of them."""
