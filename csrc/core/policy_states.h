/* The words of `states`: what each means for the policy's fields. */
#ifndef TX_CORE_POLICY_STATES_H
#define TX_CORE_POLICY_STATES_H

#include "csrc/torch_ext.h"

/* Of both moments. TX_NONE for TX_STATES_BY_KEY, which leaves them to their keys. */
tx_dtype tx_states_moments(int32_t states);

/* 1 where a word's masters are remainders, in a policy of these parameters. */
int tx_states_remainders(int32_t states, const tx_policy *policy);

#endif
