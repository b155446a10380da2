// A test framework of twenty lines: CHECK, CHECK_THROWS, and a list of tests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

#define TEST(name)                                    \
  static void name();                                 \
  static const Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

#define CHECK_THROWS(expression, type) \
  do {                                 \
    bool thrown = false;               \
    try {                              \
      expression;                      \
    } catch (const type&) {            \
      thrown = true;                   \
    }                                  \
    CHECK(thrown);                     \
  } while (0)
