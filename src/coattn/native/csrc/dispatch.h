// Which instruction set's kernels run: the best the machine has, unless one is forced.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"

namespace coattn {

struct IsaStatus {
  std::string name;
  std::string reason;  // why this machine cannot run it; empty when it can
};

// From the plainest to the best.
std::vector<IsaStatus> isas();

// The table in use. Cheap.
const Kernels& kernels();

// "" returns to the best. Refuses what the machine lacks, with the reason. Jobs already running keep their
// table.
void force_isa(const std::string& name);

}  // namespace coattn
