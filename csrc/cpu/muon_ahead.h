/* How many bytes ahead Muon's passes prefetch. */
#ifndef TX_CPU_MUON_AHEAD_H
#define TX_CPU_MUON_AHEAD_H

#define TX_MUON_AHEAD 2048
#define TX_MUON_AHEAD_UPDATE 1024 /* it has more streams */

#endif
