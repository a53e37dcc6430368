// Checks that a call returned a given error status and that its message contains a given word.
#ifndef TESTS_CORE_EXPECT_REFUSED_H
#define TESTS_CORE_EXPECT_REFUSED_H

#include <gtest/gtest.h>

#include <string>

#include "csrc/torch_ext.h"

inline void ExpectRefused(tx_status found, tx_status status, const tx_error &error, const char *word) {
  EXPECT_EQ(found, status) << error.message;
  EXPECT_NE(std::string(error.message).find(word), std::string::npos) << error.message;
}

#endif
