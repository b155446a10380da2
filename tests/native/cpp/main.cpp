#include <cstdio>
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  int ran = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran > 0 ? 0 : 1;
}
