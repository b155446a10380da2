// Threads that hand plain memory to each other through the pool's barrier, the hand-over words and the arena,
// over and over. Nothing but their own ordering makes the plain numbers right, so a missing barrier shows as a
// wrong number, as a wait without end (the watchdog), or to the thread sanitizer.
//
// COATTN_STRESS=N runs N times as many rounds.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "arena.h"
#include "check.h"
#include "mailbox.h"
#include "spin.h"
#include "worker_pool.h"

using namespace coattn;

namespace {

int rounds(int n) {
  const char* times = std::getenv("COATTN_STRESS");
  return n * (times ? std::max(1, std::atoi(times)) : 1);
}

// Ends the program when a test does not: a lost wake-up is a failure, not a wait.
class Watchdog {
 public:
  explicit Watchdog(const char* what)
      : thread_([this, what] {
          const int64_t give_up = now_ns() + int64_t{rounds(300)} * 1'000'000'000;
          while (!over_.load()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            if (now_ns() < give_up) continue;
            std::fprintf(stderr, "%s: no end after %d s\n", what, rounds(300));
            std::_Exit(1);
          }
        }) {}
  ~Watchdog() {
    over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

constexpr int kWords = 24;  // of a message: several cache lines

struct alignas(128) Message {
  uint32_t words[kWords] = {};  // plain: the word that announces it must order it
  void write(uint32_t seed) {
    for (int i = 0; i < kWords; ++i) words[i] = seed * 2654435761u + static_cast<uint32_t>(i);
  }
  bool is(uint32_t seed) const {
    for (int i = 0; i < kWords; ++i) {
      if (words[i] != seed * 2654435761u + static_cast<uint32_t>(i)) return false;
    }
    return true;
  }
};

}  // namespace

// One writer, several readers: a message is written, announced, read by all and answered, then overwritten.
TEST(stress_event_word) {
  const Watchdog watchdog("stress_event_word");
  constexpr int kReaders = 3;
  for (const int64_t spin_ns : {int64_t{0}, int64_t{200'000}}) {  // asleep at once; mostly awake
    EventWord word, answered;
    Message message, answer[kReaders];
    std::atomic<int> left{0};
    const uint32_t turns = static_cast<uint32_t>(rounds(1500));
    std::vector<std::thread> readers;
    for (int r = 0; r < kReaders; ++r) {
      readers.emplace_back([&, r] {
        for (uint32_t seen = 0; seen < turns;) {
          const uint32_t now = word.wait_past(seen, spin_ns, 4);
          CHECK(now == seen + 1);  // nobody goes on before everybody has answered
          CHECK(message.is(now));
          answer[r].write(now + static_cast<uint32_t>(r));
          seen = now;
          if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) answered.advance();
        }
      });
    }
    for (uint32_t turn = 1; turn <= turns; ++turn) {
      message.write(turn);
      left.store(kReaders, std::memory_order_relaxed);
      word.advance();
      CHECK(answered.wait_past(turn - 1, spin_ns, 4) == turn);
      for (int r = 0; r < kReaders; ++r) CHECK(answer[r].is(turn + static_cast<uint32_t>(r)));
    }
    for (std::thread& reader : readers) reader.join();
  }
}

// What each worker wrote in one job every worker reads in the next; workers come late, fall asleep and stay away.
TEST(stress_pool_barrier) {
  const Watchdog watchdog("stress_pool_barrier");
  for (const int workers : {2, 4, 7}) {
    WorkerPool pool(workers, workers == 4 ? 0 : 100);
    std::vector<Message> now(static_cast<size_t>(workers)), before(now);
    std::vector<uint32_t> pieces(61);
    const uint32_t turns = static_cast<uint32_t>(rounds(600));
    for (uint32_t turn = 1; turn <= turns; ++turn) {
      pool.run(Join::all, [&](int worker, int all) {
        for (int w = 0; turn > 1 && w < all; ++w)
          CHECK(before[w].is((turn - 1) * 16 + static_cast<uint32_t>(w)));
        now[worker].write(turn * 16 + static_cast<uint32_t>(worker));
      });
      pool.parallel_for(static_cast<int64_t>(pieces.size()), 1 + turn % 9, [&](int, int64_t lo, int64_t hi) {
        for (int w = 0; w < workers; ++w) CHECK(now[w].is(turn * 16 + static_cast<uint32_t>(w)));
        for (int64_t i = lo; i < hi; ++i) {
          CHECK(pieces[i] == (turn - 1) * static_cast<uint32_t>(i));
          pieces[i] += static_cast<uint32_t>(i);
        }
      });
      std::swap(now, before);
      for (size_t i = 0; i < pieces.size(); ++i) CHECK(pieces[i] == turn * i);
      if (turn % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  }
}

TEST(stress_pool_callers) {
  const Watchdog watchdog("stress_pool_callers");
  WorkerPool pool(3, 20);
  Message shared;  // of whoever's turn it is
  uint32_t turn = 0;
  shared.write(0);
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&, c] {
      for (int i = 0; i < rounds(400); ++i) {
        pool.run(c == 2 ? Join::willing : Join::all, [&](int worker, int) {
          if (worker != 0) return;
          CHECK(shared.is(turn));
          shared.write(++turn);
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(turn == static_cast<uint32_t>(3 * rounds(400)) && shared.is(turn));
}

// A thread is the GPU for thousands of steps. The host changes the blocks and how many tokens count before each
// step, the GPU the queries before each post; the answer tells which of them the workers saw.
TEST(stress_mailbox) {
  const Watchdog watchdog("stress_mailbox");
  constexpr int kJobs = 6, kSize = 32, kBlock = 4, kBlocks = 3;
  struct Job {
    alignas(64) uint32_t post = 0;
    alignas(64) uint32_t reply = 0;
    float q[kSize], out[kSize], lse[1];
    float blocks[kBlocks * 2 * kBlock * kSize];
  };
  std::vector<Job> jobs(kJobs);
  std::vector<int32_t> table{0, 1, 2};
  int32_t tokens = 1;
  EventWord launched;
  Mailbox mailbox(60'000'000);
  for (int j = 0; j < kJobs; ++j) {
    AttendJob job{};
    job.seqs = job.q_tokens = job.q_heads = job.kv_heads = 1;
    job.head_size = kSize;
    job.q = jobs[j].q;
    job.q_elem = job.elem = Elem::f32;
    job.q_seq = job.q_token = job.q_head = kSize;
    job.scale = 1.0f / kSize;
    job.table = table.data();
    job.tokens = &tokens;
    job.table_heads = 1;
    job.max_blocks = kBlocks;
    job.base = reinterpret_cast<const uint8_t*>(jobs[j].blocks);
    job.block_stride = job.head_stride = 2 * kBlock * kSize * sizeof(float);
    job.num_blocks = kBlocks;
    job.block = kBlock;
    job.out = jobs[j].out;
    job.lse = jobs[j].lse;
    mailbox.add(job, &jobs[j].post, &jobs[j].reply, j % 3);
  }
  const uint32_t steps = static_cast<uint32_t>(rounds(400));
  const auto value_of = [](uint32_t step, int j) { return static_cast<float>(step % 97 + 3 * j + 1); };
  const auto query_of = [](uint32_t step, int j) { return 0.01f * static_cast<float>(step % 13 + j); };
  std::thread gpu([&] {
    for (uint32_t step = 1; step <= steps; ++step) {
      launched.wait_past(step - 1, 100'000, 4);
      const auto wait = [&](int j) {
        Backoff backoff(4);
        while (__atomic_load_n(&jobs[j].reply, __ATOMIC_ACQUIRE) != step) backoff.step();
        const float value = value_of(step, j), seen = static_cast<float>(1 + step % (kBlocks * kBlock));
        for (const float x : jobs[j].out) CHECK(std::abs(x - value) <= 1e-5f * value);
        const float score = query_of(step, j) * value;  // of every key: kSize products, times scale
        CHECK(std::abs(jobs[j].lse[0] - score - std::log(seen)) <= 1e-4f * (1 + score));
      };
      for (int j = 0; j < kJobs; ++j) {  // two are on their way at a time
        std::fill_n(jobs[j].q, kSize, query_of(step, j));
        __atomic_store_n(&jobs[j].post, step, __ATOMIC_RELEASE);
        if (j > 0) wait(j - 1);
      }
      wait(kJobs - 1);
    }
  });
  for (uint32_t step = 1; step <= steps; ++step) {
    for (int j = 0; j < kJobs; ++j)
      std::fill(std::begin(jobs[j].blocks), std::end(jobs[j].blocks), value_of(step, j));
    tokens = 1 + static_cast<int32_t>(step % (kBlocks * kBlock));
    mailbox.begin(step, 1);
    launched.advance();
    const std::string failure = mailbox.finish(60'000'000);
    CHECK(failure.empty());
  }
  gpu.join();
  CHECK(mailbox.stop(5'000'000));
}

// Threads that grow the arena write to what they were given while others grow it further.
TEST(stress_arena) {
  const Watchdog watchdog("stress_arena");
  constexpr int kThreads = 4, kBytes = 4096, kBlocks = (24 << 20) / kBytes;
  WorkerPool pool(2, 20);
  for (int round = 0; round < rounds(4); ++round) {
    Arena arena(24 << 20, false);
    std::atomic<bool> stop{false};
    std::thread inspector([&] {
      int64_t committed = 0;
      while (!stop) {
        const int64_t now = arena.committed();
        CHECK(now >= committed && now <= kBlocks * kBytes);  // never shrinks
        committed = now;
        std::this_thread::yield();
      }
    });
    std::vector<std::thread> users;
    for (int u = 0; u < kThreads; ++u) {
      users.emplace_back([&, u] {
        for (int id = u; id < kBlocks; id += kThreads) {
          if (id % 64 == u) arena.grow(int64_t{std::min(kBlocks, id + 64)} * kBytes, pool);
          auto* words = reinterpret_cast<uint64_t*>(arena.base() + int64_t{id} * kBytes);
          CHECK(words[0] == 0 && words[kBytes / 8 - 1] == 0);  // fresh, though others were touched meanwhile
          words[0] = words[kBytes / 8 - 1] = static_cast<uint64_t>(id + 1);
        }
      });
    }
    for (std::thread& user : users) user.join();
    stop = true;
    inspector.join();
    for (int id = 0; id < kBlocks; ++id) {
      const auto* words = reinterpret_cast<const uint64_t*>(arena.base() + int64_t{id} * kBytes);
      CHECK(words[0] == static_cast<uint64_t>(id + 1) && words[kBytes / 8 - 1] == words[0]);
    }
  }
}
