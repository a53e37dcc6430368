/* How far ahead of what is read Muon's passes ask for memory, in bytes. */
#ifndef TX_CPU_MUON_AHEAD_H
#define TX_CPU_MUON_AHEAD_H

#define TX_MUON_AHEAD 2048
#define TX_MUON_AHEAD_UPDATE 1024 /* the update has more streams */

#endif
