#include "mailbox.h"

#include <algorithm>
#include <chrono>

#include "errors.h"
#include "fault.h"
#include "spin.h"

namespace coattn {
namespace {

// Jobs of several layers are on their way at the same time: how far from the first open one to look.
constexpr size_t kAhead = 4;

uint32_t load(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

void run(const AttendJob& job, WorkerPool& pool) {
  attend(job, pool);
}
void run(const WeightedSumJob& job, WorkerPool& pool) {
  weighted_sum(job, pool);
}

}  // namespace

// Everything the thread touches: shared with it, so that an abandoned thread finds it intact.
struct Mailbox::Server {
  struct Slot {
    MailJob job;
    uint32_t* post;
    uint32_t* reply;
    int rank;
  };

  explicit Server(int64_t deadline) : owner(runtime()), deadline_us(deadline) {}

  const std::shared_ptr<Runtime> owner;
  const int64_t deadline_us;
  std::vector<Slot> slots;
  std::vector<JobTimes> times;
  std::vector<bool> done;         // of the step being served
  EventWord armed;                // advanced by begin() and stop()
  std::atomic<uint32_t> step{0};  // the step the server is armed for
  std::atomic<int> seqs{0};
  std::atomic<bool> stopping{false}, off{false}, gone{false};
  std::atomic<uint32_t> finished{0};  // the last step that is over, well or not
  std::string error;                  // of `finished`; written before it

  void loop() {
    const auto seat = owner->pool.pin_caller();
    uint32_t seen = 0;
    while (true) {
      seen = armed.wait_past(seen, 2'000'000, 256);
      if (stopping.load(std::memory_order_acquire)) break;
      const uint32_t now = step.load(std::memory_order_acquire);
      std::string failure;
      bool dead = false;
      try {
        dead = !serve(now, failure);
      } catch (const std::exception& e) {
        failure = e.what();
      } catch (...) {  // an exception that leaves a thread ends the process
        failure = "a job threw something that is no std::exception";
      }
      if (dead) break;
      error = failure;
      finished.store(now, std::memory_order_release);
    }
    gone.store(true, std::memory_order_release);
  }

  // False: the thread is to die.
  bool serve(uint32_t now, std::string& failure) {
    done.assign(slots.size(), false);
    int64_t give_up = now_ns() + deadline_us * 1000;
    for (size_t first = 0, turn = 0; first < slots.size(); ++turn) {
      const size_t j = posted(first, now);
      if (j == slots.size()) {
        cpu_pause();
        if (turn % 4096 != 0) continue;
        if (stopping.load(std::memory_order_relaxed) || off.load(std::memory_order_relaxed)) return true;
        if (now_ns() > give_up) {
          failure = "the GPU posted no job within the deadline";
          return true;
        }
        continue;
      }
      Slot& slot = slots[j];
      times[j].posted_ns = now_ns();
      if (take_fault() == Fault::die) return false;
      std::visit(
          [&](auto& job) {
            job.seqs = seqs.load(std::memory_order_relaxed);
            run(job, owner->pool);
          },
          slot.job);
      times[j].done_ns = now_ns();
      __atomic_store_n(slot.reply, now, __ATOMIC_RELEASE);
      done[j] = true;
      while (first < slots.size() && done[first]) ++first;
      give_up = now_ns() + deadline_us * 1000;
    }
    return true;
  }

  // Of the next few jobs, the posted one that is wanted soonest; as many as there are: none.
  size_t posted(size_t first, uint32_t now) const {
    size_t best = slots.size();
    for (size_t j = first; j < std::min(first + kAhead, slots.size()); ++j) {
      if (done[j] || load(slots[j].post) != now) continue;
      if (best == slots.size() || slots[j].rank < slots[best].rank) best = j;
    }
    return best;
  }
};

Mailbox::Mailbox(int64_t deadline_us) : server_(std::make_shared<Server>(deadline_us)) {}

Mailbox::~Mailbox() {
  stop(100'000);
}

void Mailbox::add(const MailJob& job, uint32_t* post, uint32_t* reply, int rank) {
  if (thread_.joinable())
    throw Refusal("A job was added to a running mailbox.", "Add all jobs before begin().");
  server_->slots.push_back({job, post, reply, rank});
  if (auto* attending = std::get_if<AttendJob>(&server_->slots.back().job)) attending->skip_empty = true;
  server_->times.push_back({});
}

void Mailbox::begin(uint32_t step, int seqs) {
  Server& s = *server_;
  if (s.gone.load(std::memory_order_acquire)) return;  // finish() reports it
  if (s.step.load() != s.finished.load(std::memory_order_acquire)) {
    throw Refusal("A step was started while the CPU still works on the one before.", "Call finish() first.");
  }
  s.seqs.store(seqs, std::memory_order_relaxed);
  s.off.store(false, std::memory_order_relaxed);
  s.step.store(step, std::memory_order_release);
  if (!thread_.joinable()) thread_ = std::thread([server = server_] { server->loop(); });
  s.armed.advance();
}

std::string Mailbox::finish(int64_t timeout_us) {
  Server& s = *server_;
  const uint32_t step = s.step.load();
  const int64_t start = now_ns(), give_up = start + timeout_us * 1000, nap = start + 500'000;
  while (s.finished.load(std::memory_order_acquire) != step) {
    if (s.gone.load(std::memory_order_acquire)) return "the thread that serves the GPU's jobs has died";
    const int64_t now = now_ns();
    if (now > give_up) return "the CPU's workers did not answer in time";
    if (now < nap) {
      cpu_pause();  // the GPU is done, so the server is about to be
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return s.error;
}

void Mailbox::call_off() {
  server_->off.store(true, std::memory_order_relaxed);
}

std::vector<JobTimes> Mailbox::times() const {
  return server_->times;
}

bool Mailbox::stop(int64_t timeout_us) {
  if (!thread_.joinable()) return true;
  Server& s = *server_;
  s.stopping.store(true, std::memory_order_release);
  s.armed.advance();
  const int64_t give_up = now_ns() + timeout_us * 1000;
  while (!s.gone.load(std::memory_order_acquire) && now_ns() < give_up) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (!s.gone.load(std::memory_order_acquire)) {
    thread_.detach();
    return false;
  }
  thread_.join();
  return true;
}

}  // namespace coattn
