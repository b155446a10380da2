// The hand-over between a captured GPU step and the worker pool, through flags in memory both can see.
//
// A step posts the same jobs every time, about in the order in which they were added: one for each layer that
// the CPU works for. Of a few that are posted the one of the lowest rank is done first. Job j has two words,
// each on a cache line of its own, in memory that is pinned and mapped into the GPU:
//
//   word / area       writer -> reader    meaning
//   post[j]           GPU -> server       s: the query of job j of step s is complete
//   reply[j]          server -> GPU       s: out and lse of job j of step s are complete
//   query of j        GPU -> workers      written before post[j] = s; may be overwritten after reply[j] = s
//                                         (or the positions, weights and counts of a job that adds up values)
//   out, lse of j     workers -> GPU      written before reply[j] = s; may be overwritten after post[j] is
//                                         s + 1, which follows, on the same stream, the kernel that read them
//   block table,      host -> workers     written before begin(s); may be overwritten after finish(s)
//   tokens            or GPU -> workers   written before post[j] = s, like the query
//
// Of a query head whose list is empty only the lse is written; what stands in its place of out is not read.
//
// Ordering. GPU to CPU: the posting kernel stores the query, then post[j] with release at system scope; PCIe
// keeps posted writes in order, and the server's acquire load pairs with it. CPU to GPU: the pool's barrier
// orders the workers' stores before the server's release store of reply[j]; the GPU's polling kernel ends
// once it has seen it, and the kernel that reads out and lse starts after that with no line of them in its
// caches, since host memory is not kept there across kernels. begin() arms the server before the step is
// launched, so no post can be missed: words only grow, and the server compares for equality with the step it
// was armed for.
//
// Deadlines. The GPU gives up a wait by itself (it cannot be interrupted); the server gives up waiting for a
// post when the step is called off or past its deadline. A server whose thread does not come back is
// abandoned together with its memory: it may still write there, so neither is ever used again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "kernels/attend.h"
#include "kernels/weighted_sum.h"
#include "runtime.h"

namespace coattn {

using MailJob = std::variant<AttendJob, WeightedSumJob>;

struct JobTimes {
  int64_t posted_ns, done_ns;
};

class Mailbox {
 public:
  explicit Mailbox(int64_t deadline_us);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Before the first begin(). The pointers stay the caller's and must outlive the mailbox, also an abandoned
  // one. rank: what the GPU will wait for first has the lowest.
  void add(const MailJob& job, uint32_t* post, uint32_t* reply, int rank);

  // Arms the server for step `step` (never 0, never twice the same in a row) over the first `seqs` sequences.
  void begin(uint32_t step, int seqs);
  // Waits until the armed step is over. Empty, or why it failed.
  std::string finish(int64_t timeout_us);
  // The armed step will not be posted to its end.
  void call_off();
  // When each job of the last finished step was seen and done, on the clock of now_ns().
  std::vector<JobTimes> times() const;

  // False once the thread did not come back in time; the mailbox then leaks what the thread may touch.
  bool stop(int64_t timeout_us);

 private:
  struct Server;
  std::shared_ptr<Server> server_;
  std::thread thread_;
};

}  // namespace coattn
