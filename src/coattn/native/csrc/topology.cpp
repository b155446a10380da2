#include "topology.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace coattn {
namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int> affinity() {
  // A fixed-size cpu_set_t holds 1024 CPUs; larger machines make the call fail with EINVAL, so grow the mask.
  for (int cpus = 1024; cpus <= 1 << 16; cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    std::vector<int> ids;
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; ok && cpu < cpus; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) ids.push_back(cpu);
    }
    CPU_FREE(set);
    if (ok) return ids;
  }
  return {0};
}

// "max 100000" or "150000 100000" -> CPUs, negative without a limit.
double quota_v2(const std::string& line) {
  // strtod, not a stream: reading a number from a std::istream crashed here inside a process that had loaded
  // PyTorch 2.11, and not in a program of its own; why was not found out.
  const size_t space = line.find(' ');
  if (space == std::string::npos || line.compare(0, space, "max") == 0) return -1;
  const double quota = std::strtod(line.c_str(), nullptr),
               period = std::strtod(line.c_str() + space, nullptr);
  return quota > 0 && period > 0 ? quota / period : -1;
}

double quota_v1(const std::string& folder) {
  const std::string quota = read_line(folder + "/cpu.cfs_quota_us"),
                    period = read_line(folder + "/cpu.cfs_period_us");
  if (quota.empty() || period.empty() || quota[0] == '-') return -1;
  const double allowed = std::strtod(quota.c_str(), nullptr), span = std::strtod(period.c_str(), nullptr);
  return allowed > 0 && span > 0 ? allowed / span : -1;
}

double tighter(double a, double b) {
  if (a < 0) return b;
  return b < 0 ? a : std::min(a, b);
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> ids;
  std::istringstream in(text);
  std::string part;
  while (std::getline(in, part, ',')) {
    if (part.empty() || part[0] < '0' || part[0] > '9') continue;
    const size_t dash = part.find('-');
    const int first = std::stoi(part);
    const int last = dash == std::string::npos ? first : std::stoi(part.substr(dash + 1));
    for (int cpu = first; cpu <= last; ++cpu) ids.push_back(cpu);
  }
  return ids;
}

std::vector<Cpu> usable_cpus() {
  std::vector<Cpu> cpus;
  for (int id : affinity()) cpus.push_back({id, 0, 0});
  for (int node : parse_cpu_list(read_line("/sys/devices/system/node/online"))) {
    const auto members =
        parse_cpu_list(read_line("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"));
    for (Cpu& cpu : cpus) {
      if (std::find(members.begin(), members.end(), cpu.id) != members.end()) cpu.node = node;
    }
  }
  for (Cpu& cpu : cpus) {
    const auto siblings = parse_cpu_list(
        read_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu.id) + "/topology/thread_siblings_list"));
    // Only siblings we may use count: a mask that holds just the second thread of a core still has that core.
    for (int other : siblings) {
      if (other >= cpu.id) continue;
      cpu.sibling += std::any_of(cpus.begin(), cpus.end(), [&](const Cpu& c) { return c.id == other; });
    }
  }
  std::stable_sort(cpus.begin(), cpus.end(), [](const Cpu& a, const Cpu& b) {
    return a.sibling != b.sibling ? a.sibling < b.sibling : a.node < b.node;
  });
  return cpus;
}

double cgroup_cpus() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  double limit = -1;
  while (std::getline(file, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    // Every ancestor may set a tighter limit; inside a container the path may not exist below the mount,
    // hence root.
    while (true) {
      const std::string folder = root + (path == "/" ? "" : path);
      limit = tighter(limit, v2 ? quota_v2(read_line(folder + "/cpu.max")) : quota_v1(folder));
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limit;
}

int default_threads() {
  const auto cpus = usable_cpus();
  int cores =
      static_cast<int>(std::count_if(cpus.begin(), cpus.end(), [](const Cpu& c) { return c.sibling == 0; }));
  const double quota = cgroup_cpus();
  if (quota > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota)));
  // One core of many is left to the threads that feed the pool, launch kernels on a GPU and serve the system:
  // a job waits for its slowest worker, and that is the one that shares its core.
  if (cores >= 8) --cores;
  return std::max(cores, 1);
}

}  // namespace coattn
