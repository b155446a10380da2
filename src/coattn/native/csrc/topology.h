// Which CPUs this process may use, and in which order workers should take them.
#pragma once

#include <string>
#include <vector>

namespace coattn {

struct Cpu {
  int id = 0;
  int node = 0;
  int sibling = 0;  // 0 for the first hardware thread of its core, 1 for the second, ...
};

// CPUs of the affinity mask. First hardware threads first, nodes kept together within them, so that the first
// n entries are the best n CPUs and neighbouring workers share a node.
std::vector<Cpu> usable_cpus();

// Cores in the affinity mask, less what a cgroup CPU quota takes away (rounded up, at least 1), less one of
// eight or more.
int default_threads();

// CPU quota of this process's cgroup in CPUs, or a negative number without one.
double cgroup_cpus();

// "0-3,8" -> 0 1 2 3 8, the format of cpulist files.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace coattn
