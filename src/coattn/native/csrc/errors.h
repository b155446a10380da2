// A refusal that reaches Python as one sentence and one hint.
#pragma once

#include <stdexcept>
#include <string>

namespace coattn {

struct Refusal : std::runtime_error {
  Refusal(std::string sentence, std::string hint)
      : std::runtime_error(sentence + " " + hint), sentence(std::move(sentence)), hint(std::move(hint)) {}
  std::string sentence;
  std::string hint;
};

}  // namespace coattn
