/* The meaning of each value of `states` for the policy's fields. */
#ifndef TX_CORE_POLICY_STATES_H
#define TX_CORE_POLICY_STATES_H

#include "csrc/torch_ext.h"

/* The dtype of both moments; TX_NONE for TX_STATES_BY_KEY, which leaves it to their own keys. */
tx_dtype tx_states_moments(int32_t states);

/* Returns 1 if masters are remainders, for this `states` in this policy. */
int tx_states_remainders(int32_t states, const tx_policy *policy);

#endif
