/* Offsets of a block's dithered thresholds from that of its first element, for AVX-512 loops. Included by
 * avx512_codes.h and avx512_ema.h. */
#ifndef TX_CPU_AVX512_RAMP_H
#define TX_CPU_AVX512_RAMP_H

#include "csrc/math/dither.h"
#include "csrc/torch_ext.h"

/* tx_dithered(0, 2 * i + k) at [k][i]. */
#define TX_RAMP_(i) (i) * (2 * TX_LATTICE_ELEMENT) + TX_AVX512_FIRST_
#define TX_RAMP_4_(i) TX_RAMP_(i), TX_RAMP_(i + 1u), TX_RAMP_(i + 2u), TX_RAMP_(i + 3u)
#define TX_RAMP_16_(i) TX_RAMP_4_(i), TX_RAMP_4_(i + 4u), TX_RAMP_4_(i + 8u), TX_RAMP_4_(i + 12u)
#define TX_RAMP_64_ TX_RAMP_16_(0u), TX_RAMP_16_(16u), TX_RAMP_16_(32u), TX_RAMP_16_(48u)
static const uint32_t tx_avx512_ramp[2][TX_BLOCK / 2] __attribute__((aligned(64))) = {
#define TX_AVX512_FIRST_ 0u
    {TX_RAMP_64_},
#undef TX_AVX512_FIRST_
#define TX_AVX512_FIRST_ TX_LATTICE_ELEMENT
    {TX_RAMP_64_},
#undef TX_AVX512_FIRST_
};
#undef TX_RAMP_64_
#undef TX_RAMP_16_
#undef TX_RAMP_4_
#undef TX_RAMP_

#endif
