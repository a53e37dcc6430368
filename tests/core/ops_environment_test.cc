// The state of the calling thread must not matter: another rounding mode, flushed subnormals, trapping exceptions, a
// locale with a decimal comma, a small stack, a forked child. Every function has to give the same bits and the same
// messages as on a plain thread, and leave the floating-point mode unchanged.

#include <fenv.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <locale.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <tuple>

#include "tests/core/environment_questions.h"
#include "tests/core/flush_mode.h"

namespace {

using environment::Answer;
using environment::kQuestions;
using environment::Question;

std::string Ask(const Question &question) {
  Answer answer;
  question.ask(&answer);
  return answer.bytes();
}

template <int mode>
std::string Rounding(const Question &question) {
  EXPECT_EQ(fesetround(mode), 0);
  const std::string answer = Ask(question);
  EXPECT_EQ(fegetround(), mode);
  fesetround(FE_TONEAREST);
  return answer;
}

std::string Flushing(const Question &question) {
  std::string answer;
  CallInFlushMode([&] { answer = Ask(question); });
  return answer;
}

// An inexact operation, or one with a NaN, raises a signal. So the library must not compute in the caller's mode.
std::string Trapping(const Question &question) {
  constexpr int kAll = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT;
  feclearexcept(FE_ALL_EXCEPT);
  if (feenableexcept(kAll) == -1) return Ask(question);  // the processor cannot trap (aarch64)
  const std::string answer = Ask(question);
  EXPECT_EQ(fegetexcept(), kAll);
  fedisableexcept(kAll);
  EXPECT_EQ(fetestexcept(FE_ALL_EXCEPT), 0);
  return answer;
}

std::string DecimalComma(const Question &question) {
  const std::string folder = ::testing::TempDir();
  const std::string command = "cd '" + folder +
                              "' && printf 'LC_NUMERIC\\ndecimal_point \",\"\\nthousands_sep \".\"\\ngrouping 3;3\\n"
                              "END LC_NUMERIC\\n' > comma.src && "
                              "(localedef -c -i comma.src ./comma >/dev/null 2>&1; test -e comma/LC_NUMERIC)";
  if (system(command.c_str()) != 0) return "";  // localedef is not installed
  setenv("LOCPATH", folder.c_str(), 1);
  EXPECT_NE(setlocale(LC_NUMERIC, "comma"), nullptr);
  char number[16];
  snprintf(number, sizeof number, "%.1f", 0.5);
  EXPECT_STREQ(number, "0,5");
  const std::string answer = Ask(question);
  snprintf(number, sizeof number, "%.1f", 0.5);
  EXPECT_STREQ(number, "0,5");
  setlocale(LC_NUMERIC, "C");
  return answer;
}

// The stack that a call needs according to torch_ext.h, plus what the question needs; sanitizers need more.
#ifdef TX_SANITIZED
constexpr size_t kStack = 128 << 10;
#else
constexpr size_t kStack = (64 + 16) << 10;
#endif

std::string SmallStack(const Question &question) {
  struct Job {
    const Question *question;
    std::string answer;
  } job = {&question, ""};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  // On aarch64 a thread's stack has at least 128 KiB.
  EXPECT_EQ(pthread_attr_setstacksize(&attributes, std::max(kStack, static_cast<size_t>(PTHREAD_STACK_MIN))), 0);
  pthread_t thread;
  EXPECT_EQ(pthread_create(
                &thread, &attributes,
                [](void *arg) -> void * {
                  auto *j = static_cast<Job *>(arg);
                  j->answer = Ask(*j->question);
                  return nullptr;
                },
                &job),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  return job.answer;
}

std::string Child(const Question &question) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string answer = Ask(question);
    size_t sent = 0;
    while (sent < answer.size()) {
      const ssize_t n = write(ends[1], answer.data() + sent, answer.size() - sent);
      if (n <= 0) break;
      sent += static_cast<size_t>(n);
    }
    _exit(0);
  }
  close(ends[1]);
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    answer.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return answer;
}

struct Environment {
  const char *id;
  std::string (*ask)(const Question &question);
};
const Environment kEnvironments[] = {
    {"rounds_up", Rounding<FE_UPWARD>},
    {"rounds_down", Rounding<FE_DOWNWARD>},
    {"rounds_to_zero", Rounding<FE_TOWARDZERO>},
    {"flushes_subnormals", Flushing},
    {"traps_exceptions", Trapping},
    {"decimal_comma", DecimalComma},
    {"small_stack", SmallStack},
    {"forked_child", Child},
};
void PrintTo(const Environment &environment, std::ostream *out) {
  *out << environment.id;
}

class EnvironmentTest : public ::testing::TestWithParam<std::tuple<Environment, Question>> {};

TEST_P(EnvironmentTest, AnswersAsOnAPlainThread) {
  const auto &[environment, question] = GetParam();
  const std::string plain = Ask(question);
  ASSERT_EQ(Ask(question), plain) << "the question itself is not the same twice";
  const std::string there = environment.ask(question);
  if (there.empty()) GTEST_SKIP() << "no localedef here, which makes a locale with a decimal comma";
  size_t at = 0;
  while (at < std::min(plain.size(), there.size()) && there[at] == plain[at])
    at++;
  EXPECT_TRUE(there == plain) << "byte " << at << " of " << plain.size() << " is another one; near it: "
                              << ::testing::PrintToString(there.substr(at < 40 ? 0 : at - 40, 120))
                              << "\nplain: " << ::testing::PrintToString(plain.substr(at < 40 ? 0 : at - 40, 120));
}

INSTANTIATE_TEST_SUITE_P(All, EnvironmentTest,
                         ::testing::Combine(::testing::ValuesIn(kEnvironments), ::testing::ValuesIn(kQuestions)),
                         [](const auto &info) {
                           return std::string(std::get<0>(info.param).id) + "_" + std::get<1>(info.param).id;
                         });

}  // namespace
