// Compares our declarations of DLPack's table with the header that torch ships, field by field. Nothing is linked to
// torch.
#include <ATen/dlpack.h>

#include <cstddef>
#include <type_traits>

#include "csrc/torch/dlpack.h"
#include "gtest/gtest.h"

#define TX_SAME(ours, our_field, theirs, their_field)                                                  \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field), #our_field ": elsewhere"); \
  static_assert(sizeof(ours::our_field) == sizeof(theirs::their_field), #our_field ": of another size")

TX_SAME(tx_dl_tensor, data, DLTensor, data);
TX_SAME(tx_dl_tensor, device_type, DLTensor, device.device_type);
TX_SAME(tx_dl_tensor, device_id, DLTensor, device.device_id);
TX_SAME(tx_dl_tensor, ndim, DLTensor, ndim);
TX_SAME(tx_dl_tensor, code, DLTensor, dtype.code);
TX_SAME(tx_dl_tensor, bits, DLTensor, dtype.bits);
TX_SAME(tx_dl_tensor, lanes, DLTensor, dtype.lanes);
TX_SAME(tx_dl_tensor, shape, DLTensor, shape);
TX_SAME(tx_dl_tensor, strides, DLTensor, strides);
TX_SAME(tx_dl_tensor, byte_offset, DLTensor, byte_offset);
static_assert(sizeof(tx_dl_tensor) == sizeof(DLTensor));

TEST(TorchDlpack, TheTableHasOurFields) {
#if DLPACK_MAJOR_VERSION == 1 && DLPACK_MINOR_VERSION >= 3
  TX_SAME(tx_dl_exchange, major, DLPackExchangeAPI, header.version.major);
  TX_SAME(tx_dl_exchange, older, DLPackExchangeAPI, header.prev_api);
  TX_SAME(tx_dl_exchange, tensor_from_object, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
  TX_SAME(tx_dl_exchange, current_stream, DLPackExchangeAPI, current_work_stream);
  static_assert(sizeof(tx_dl_exchange) == sizeof(DLPackExchangeAPI));
#else
  GTEST_SKIP() << "the installed torch's header has no such table";
#endif
}

TEST(TorchDlpack, TheNumbersAreTheirs) {
  EXPECT_EQ(TX_DLPACK_MAJOR, DLPACK_MAJOR_VERSION);
  EXPECT_EQ((int)TX_DL_CPU, (int)kDLCPU);
  EXPECT_EQ((int)TX_DL_CUDA, (int)kDLCUDA);
  EXPECT_EQ((int)TX_DL_INT, (int)kDLInt);
  EXPECT_EQ((int)TX_DL_UINT, (int)kDLUInt);
  EXPECT_EQ((int)TX_DL_FLOAT, (int)kDLFloat);
  EXPECT_EQ((int)TX_DL_BFLOAT, (int)kDLBfloat);
  EXPECT_EQ((int)TX_DL_BOOL, (int)kDLBool);
}
