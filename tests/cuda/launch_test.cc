// What a call checks about its device before it launches anything, and how it reports problems.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "csrc/torch_ext_cuda.h"
#include "tests/core/arrays.h"

namespace {

class Launch : public testing::Test {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }

  // A call that would write to main_grads.
  tx_status Accumulate(int32_t device = 0, uint64_t size = sizeof(tx_cuda_call)) {
    tx_cuda_call call = TX_CUDA_CALL_INIT;
    call.device = device;
    call.size = size;
    const tx_tensor main = main_.tensor(), grad = grad_.tensor();
    return tx_cuda_bucket_accumulate(1, &main, &grad, &call, &error_);
  }
  std::string Message() const { return error_.message; }
  bool Untouched() { return main_.Get(0) == 1.0f && emulated::world.launches == 0; }

  Array main_{TX_F32, {1.0f}}, grad_{TX_BF16, {2.0f}};
  tx_error error_ = {};
};

TEST_F(Launch, RunsOnTheDeviceOfTheCallAndPutsTheCurrentOneBack) {
  emulated::world.devices = 4;
  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  ASSERT_EQ(Accumulate(3), TX_OK) << Message();
  EXPECT_EQ(main_.Get(0), 3.0f);
  EXPECT_EQ(emulated::world.current, 2);
  EXPECT_EQ(emulated::world.launches, 1);
  EXPECT_EQ(emulated::world.synchronisations, 0);
}

// A thread of another rank's process that never chose a device: "restoring" its device would select device 0 and create
// a context there.
TEST_F(Launch, AThreadWithoutADeviceMakesNoContextOnAnotherOne) {
  emulated::world.devices = 4;
  for (int call = 0; call < 2; call++)
    std::thread([&] {
      EXPECT_EQ(tx_cuda_check_device(3, &error_), TX_OK) << Message();
      EXPECT_EQ(Accumulate(3), TX_OK) << Message();
      EXPECT_EQ(Accumulate(3), TX_OK) << Message();
      EXPECT_EQ(Accumulate(1, 8), TX_ERROR_INVALID_ARGUMENT);
    }).join();
  EXPECT_EQ(emulated::world.contexts, 1u << 3);
  EXPECT_EQ(emulated::world.launches, 4);
}

TEST_F(Launch, AThreadWhoseDeviceIsInUseGoesOnThere) {
  emulated::world.devices = 4;
  for (const int before : {0, 2})
    std::thread([&] {
      ASSERT_EQ(cudaSetDevice(before), cudaSuccess);
      EXPECT_EQ(Accumulate(3), TX_OK) << Message();
      int now = -1;
      EXPECT_EQ(cudaGetDevice(&now), cudaSuccess);
      EXPECT_EQ(now, before);
    }).join();
}

// If the driver cannot be asked, the device is always restored.
TEST_F(Launch, WhereTheDriverDoesNotTellTheCurrentDeviceIsPutBack) {
  emulated::world.devices = 4;
  emulated::world.driver_answers = false;
  ASSERT_EQ(Accumulate(3), TX_OK) << Message();
  EXPECT_EQ(emulated::world.current, 0);
}

TEST_F(Launch, TheCaptureModeOfAThreadIsExchanged) {
  int32_t mode = 2;
  ASSERT_EQ(tx_cuda_exchange_capture_mode(&mode, &error_), TX_OK) << Message();
  EXPECT_EQ(mode, 0);
  EXPECT_EQ(emulated::CaptureMode(), 2);
  std::thread([] { EXPECT_EQ(emulated::CaptureMode(), 0); }).join();
  ASSERT_EQ(tx_cuda_exchange_capture_mode(&mode, &error_), TX_OK) << Message();
  EXPECT_EQ(mode, 2);
  EXPECT_EQ(emulated::CaptureMode(), 0);
  for (int32_t wrong : {-1, 3}) {
    EXPECT_EQ(tx_cuda_exchange_capture_mode(&wrong, &error_), TX_ERROR_ILLEGAL_VALUE);
    EXPECT_NE(Message().find("0 (global), 1 (thread local) and 2 (relaxed) are legal"), std::string::npos);
  }
  EXPECT_EQ(tx_cuda_exchange_capture_mode(nullptr, &error_), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(emulated::world.contexts, 0u);
}

// Loading a kernel at its first use would invalidate captures of other threads, and of this one, unless the thread is
// in relaxed mode. The mode is restored afterwards, also after failures.
TEST_F(Launch, AKernelIsFirstLoadedWithinACapture) {
  emulated::world.capturing = true;
  EXPECT_EQ(tx_cuda_check_device(0, &error_), TX_OK) << Message();
  EXPECT_EQ(Accumulate(), TX_OK) << Message();
  EXPECT_EQ(main_.Get(0), 3.0f);
  EXPECT_EQ(emulated::CaptureMode(), cudaStreamCaptureModeGlobal);
  emulated::world.sticky = cudaErrorIllegalAddress;
  EXPECT_EQ(Accumulate(), TX_ERROR_BAD_STATE);
  emulated::world.sticky = cudaSuccess;
  emulated::world.no_image = cudaErrorNoKernelImageForDevice;
  EXPECT_EQ(tx_cuda_check_device(0, &error_), TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(emulated::CaptureMode(), cudaStreamCaptureModeGlobal);
}

TEST_F(Launch, ItIsAskedOnceForEachDeviceHowManyBlocksRunOnIt) {
  for (const int processors : {2, 3}) {
    for (int call = 0; call < 3; call++) {
      emulated::Use(processors, 7);
      ASSERT_EQ(Accumulate(emulated::world.current), TX_OK) << Message();
      EXPECT_EQ(emulated::world.occupancy_queries, processors - 1);
      EXPECT_EQ(emulated::world.blocks, 1u) << "there is one tile";
    }
  }
}

TEST_F(Launch, AGridHasTheBlocksThatRunAtATime) {
  const int64_t n = 1 << 20;
  Array main(TX_F32, n, 0), grad(TX_BF16, n, 0);
  const tx_tensor to = main.tensor(), from = grad.tensor();
  for (int call = 0; call < 2; call++)
    for (const int processors : {1, 5}) {
      emulated::Use(processors, 3);
      tx_cuda_call at = TX_CUDA_CALL_INIT;
      at.device = emulated::world.current;
      ASSERT_EQ(tx_cuda_bucket_accumulate(1, &to, &from, &at, &error_), TX_OK) << Message();
      EXPECT_EQ(emulated::world.blocks, 3u * static_cast<uint32_t>(processors));
    }
}

// The 32 KiB of parameters are only used for many tensors.
TEST_F(Launch, ACallOfFewTensorsHasSmallParameters) {
  for (const int64_t n : {1, 16, 17, 300}) {
    emulated::world = emulated::World();
    std::vector<tx_tensor> main, grads;
    std::vector<Array> arrays;
    for (int64_t i = 0; i < 2 * n; i++)
      arrays.emplace_back(TX_F32, std::vector<float>{static_cast<float>(i)});
    for (int64_t i = 0; i < n; i++) {
      main.push_back(arrays[static_cast<size_t>(i)].tensor());
      grads.push_back(arrays[static_cast<size_t>(n + i)].tensor());
    }
    tx_cuda_call call = TX_CUDA_CALL_INIT;
    ASSERT_EQ(tx_cuda_bucket_accumulate(n, main.data(), grads.data(), &call, &error_), TX_OK) << Message();
    EXPECT_EQ(emulated::world.launches, 1);
    EXPECT_EQ(emulated::world.largest_parameters < 2048, n <= 16) << n;
    for (int64_t i = 0; i < n; i++)
      EXPECT_EQ(arrays[static_cast<size_t>(i)].Get(0), static_cast<float>(n + 2 * i));
  }
}

// A device that was found usable is not checked again, so each of these has its own ordinal.
TEST_F(Launch, ADeviceWithoutABuiltArchitectureIsNamedWithThoseBuilt) {
  emulated::world.devices = 10;
  emulated::world.major = 7;
  emulated::world.minor = 5;
  EXPECT_EQ(Accumulate(5), TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(Message(), "device 5 is sm_75; this library was built for sm_80 sm_90 sm_100 and PTX of 10.0");
  EXPECT_TRUE(Untouched());
  emulated::world.major = 8;
  emulated::world.minor = 9;  // runs code that was built for 8.0
  EXPECT_EQ(Accumulate(6), TX_OK) << Message();
  emulated::world.major = 12;  // runs the PTX
  EXPECT_EQ(Accumulate(7), TX_OK) << Message();
}

TEST_F(Launch, ADriverThatIsTooOldIsNamedWithTheCudaBuiltWith) {
  emulated::world.devices = 10;
  emulated::world.driver = 12080;
  EXPECT_EQ(Accumulate(8), TX_ERROR_UNAVAILABLE);
  EXPECT_NE(Message().find("the driver runs CUDA 12.8 and this library was built with CUDA 13.0"), std::string::npos);
  emulated::world.driver = 0;
  EXPECT_EQ(Accumulate(8), TX_ERROR_UNAVAILABLE);
  EXPECT_NE(Message().find("there is no CUDA driver"), std::string::npos);
  EXPECT_TRUE(Untouched());
}

TEST_F(Launch, AnErrorOfEarlierWorkIsReportedAsSuch) {
  emulated::world.sticky = cudaErrorIllegalAddress;
  EXPECT_EQ(Accumulate(), TX_ERROR_BAD_STATE);
  EXPECT_NE(Message().find("earlier work on this device failed"), std::string::npos);
  EXPECT_TRUE(Untouched());
}

// An error that another caller did not read, and that does not prevent further work.
TEST_F(Launch, AnErrorThatIsNotFatalIsToldOnce) {
  emulated::world.left = cudaErrorPeerAccessAlreadyEnabled;
  EXPECT_EQ(Accumulate(), TX_ERROR_BAD_STATE);
  EXPECT_NE(Message().find("earlier work on this device failed"), std::string::npos);
  EXPECT_TRUE(Untouched());
  EXPECT_EQ(Accumulate(), TX_OK) << Message();
}

TEST_F(Launch, ACallOfAnotherSizeOrDeviceIsRefused) {
  EXPECT_EQ(Accumulate(0, 8), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(Accumulate(50), TX_ERROR_DEVICE);
  EXPECT_EQ(Message(), "device is 50; this machine has devices 0 to 0");
  EXPECT_EQ(Accumulate(-1), TX_ERROR_DEVICE);
  EXPECT_TRUE(Untouched());
}

TEST_F(Launch, AboutNamesVersionsArchitecturesAndWhyNot) {
  tx_cuda_about about = TX_CUDA_ABOUT_INIT;
  ASSERT_EQ(tx_cuda_about_this(&about, nullptr), TX_OK);
  EXPECT_EQ(about.runtime_version, CUDART_VERSION);
  EXPECT_EQ(about.driver_version, 13000);
  EXPECT_EQ(about.n_devices, 1);
  EXPECT_STREQ(about.architectures, "sm_80 sm_90 sm_100 and PTX of 10.0");
  EXPECT_STREQ(about.why_not, "");
  about.size = 1;
  EXPECT_EQ(tx_cuda_about_this(&about, &error_), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_cuda_version(), tx_version());
}

}  // namespace
